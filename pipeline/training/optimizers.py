"""The optimizers, their schedules, and their state as flat named tensors for a checkpoint.

Schedules are functions of the step alone, so that a resumed run agrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.errors import EnvironmentFault


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer moves, by name."""
    return {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }


def make_optimizer(
    modules: Mapping[str, nn.Module], peak_lrs: Mapping[str, float], settings: TrainConfig
) -> torch.optim.Optimizer:
    """AdamW over the parameters that train, with 32-bit or 8-bit moments; biases and norms do not
    decay.

    Each group's `peak_lr` is the learning rate at its highest, that of its module.

    Raises:
        EnvironmentFault: 8-bit moments are asked for and bitsandbytes cannot be imported.
    """
    groups = [
        group
        for name, module in modules.items()
        for group in _groups(module, peak_lrs[name], settings.weight_decay)
    ]
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=True)
    try:
        from pipeline.training.adamw_8bit import SlicedAdamW8bit
    except (ImportError, RuntimeError) as error:
        fix = "Install bitsandbytes for this machine, or set train.optimizer: adamw."
        raise EnvironmentFault(
            f"bitsandbytes cannot be imported: {error}.", "train.optimizer", fix
        ) from error
    return SlicedAdamW8bit(groups)


def set_lr(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Every group learns at this share of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak_lr"]


def _groups(module: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    weights: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in trained(module).items():
        is_weight = parameter.dim() > 1 and not name.endswith(
            "bias"
        )  # a norm's has one dimension; biases are stacked
        (weights if is_weight else others).append(parameter)
    decays = [(weights, weight_decay), (others, 0.0)]
    return [
        {"params": each, "weight_decay": decay, "lr": lr, "peak_lr": lr}
        for each, decay in decays
        if each
    ]


def optimizer_tensors(
    optimizer: torch.optim.Optimizer,
) -> tuple[dict[str, Tensor], dict[str, int | float]]:
    """The optimizer's state as tensors and numbers, each under `<parameter>.<path>`."""
    leaves = dict(_leaves(optimizer.state_dict()["state"]))
    tensors = {name: value for name, value in leaves.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in leaves.items() if name not in tensors}


def load_optimizer(
    optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, Any]
) -> None:
    """Put a state of `optimizer_tensors` back; learning rates and decays stay those of the
    settings.
    """
    state: dict[Any, Any] = {}
    for name, value in {**tensors, **numbers}.items():
        index, *path, last = name.split(".")
        place = state.setdefault(int(index), {})
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    optimizer.load_state_dict(
        {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}
    )


def _leaves(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def cosine_with_warmup(step: int, total_steps: int, warmup_steps: int) -> float:
    """Linear from 0 to 1 over the warmup, then half a cosine down to 0 at `total_steps` (paper,
    appendix B).

    The same multiplier as transformers' `get_cosine_schedule_with_warmup`; 0 from `total_steps` on.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def heads_weight(
    step: int, total_steps: int, lambda_0: float, schedule: Literal["sine", "linear", "constant"]
) -> float:
    """What the heads' losses weigh beside the backbone's in step t of T (paper 2.2.2 and 2.3.2,
    appendix B).

    `sine`: lambda_0 · sin(pi/2 · t/T), a quarter wave, so that the heads do not disturb the
    backbone while they know nothing; `linear`: lambda_0 · t/T; `constant`: lambda_0.
    """
    progress = min(1.0, step / max(1, total_steps))
    shares = {"sine": math.sin(math.pi / 2 * progress), "linear": progress, "constant": 1.0}
    return lambda_0 * shares[schedule]
