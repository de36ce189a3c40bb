"""The optimizers, and their state as flat named tensors for a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.errors import EnvironmentFault


def make_optimizer(heads: nn.Module, settings: TrainConfig, backbone: nn.Module | None = None) -> torch.optim.Optimizer:
    """AdamW over the parameters that train, with 32-bit or 8-bit moments; biases do not decay.

    Each group's `peak_lr` is the learning rate at its highest: that of the heads, or of the backbone.

    Raises:
        EnvironmentFault: 8-bit moments are asked for and bitsandbytes cannot be imported.
    """
    groups = _groups(heads, settings.lr, settings.weight_decay)
    if backbone is not None:
        groups += _groups(backbone, settings.peak_backbone_lr, settings.weight_decay)
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=settings.lr, fused=True)
    try:
        from pipeline.training.adamw_8bit import SlicedAdamW8bit
    except (ImportError, RuntimeError) as error:
        fix = "Install bitsandbytes for this machine, or set train.optimizer: adamw."
        raise EnvironmentFault(f"bitsandbytes cannot be imported: {error}.", "train.optimizer", fix) from error
    return SlicedAdamW8bit(groups, lr=settings.lr)


def set_lr(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Every group learns at this share of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak_lr"]


def _groups(module: nn.Module, lr: float, weight_decay: float) -> list[dict[str, Any]]:
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    weights = [parameter for name, parameter in trained.items() if not name.endswith("bias")]
    biases = [parameter for name, parameter in trained.items() if name.endswith("bias")]
    decays = [(weights, weight_decay), (biases, 0.0)]
    return [{"params": each, "weight_decay": decay, "lr": lr, "peak_lr": lr} for each, decay in decays if each]


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, int | float]]:
    """The optimizer's state as tensors and numbers, each under `<parameter>.<path>`."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int | float] = {}
    for name, value in _leaves(optimizer.state_dict()["state"]):
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            numbers[name] = value
    return tensors, numbers


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
    """Put a state of `optimizer_tensors` back; learning rates and decays stay those of the settings."""
    state: dict[Any, Any] = {}
    for name, value in {**tensors, **numbers}.items():
        index, *path, last = name.split(".")
        place = state.setdefault(int(index), {})
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _leaves(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
