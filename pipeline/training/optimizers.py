"""AdamW with 32-bit or 8-bit moments, and schedules of the learning rate and the heads' weight.

Schedules depend only on the step, so a resumed training uses the same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.errors import EnvironmentFault

ParameterGroup = dict[str, Any]  # the arguments of one group of torch's optimizers


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters that require gradients, by name."""
    named = module.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def make_optimizer(
    modules: Mapping[str, nn.Module], peak_lrs: Mapping[str, float], settings: TrainConfig
) -> torch.optim.Optimizer:
    """Create AdamW over the trainable parameters, without weight decay.

    Each parameter group has its module's peak learning rate as `peak_lr`, for `set_lr`.

    Raises:
        EnvironmentFault: 8-bit moments are required and bitsandbytes cannot be imported.
    """
    groups = []
    for module_name, module in modules.items():
        lr = peak_lrs[module_name]
        parameters = list(trainable_parameters(module).values())
        groups.append({"params": parameters, "weight_decay": 0.0, "lr": lr, "peak_lr": lr})
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=True)
    return _adamw_8bit(groups)


def _adamw_8bit(groups: list[ParameterGroup]) -> torch.optim.Optimizer:
    """Create bitsandbytes' 8-bit AdamW, in which each matrix of a stack is a separate parameter.

    The CUDA kernels count elements in 32 bits: five lm_heads of a 128k vocabulary in one tensor
    (2.6e9 elements) would overflow. So the optimizer's parameters are views that share the memory
    of the stacks. Raises EnvironmentFault if bitsandbytes cannot be imported.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, RuntimeError) as error:
        raise EnvironmentFault(
            f"bitsandbytes cannot be imported: {error}.",
            "train.optimizer",
            "Install bitsandbytes for this machine, or set train.optimizer: adamw.",
        ) from error

    slices = {}
    sliced_groups = []
    for group in groups:
        sliced = []
        for stack in group["params"]:
            slices[stack] = [nn.Parameter(view) for view in _matrices(stack.detach())]
            sliced += slices[stack]
        sliced_groups.append({**group, "params": sliced})
    optimizer = AdamW8bit(sliced_groups)

    def pass_gradients(*_: Any) -> None:
        """Give each matrix its slice of the stack's gradient; called before an optimizer step."""
        for stack, parameters in slices.items():
            assert stack.grad is not None, "the trainer gives every parameter a gradient"
            for parameter, gradient in zip(parameters, _matrices(stack.grad), strict=True):
                parameter.grad = gradient

    optimizer.register_step_pre_hook(pass_gradients)
    # The gradients of the slices; the trainer clears those of the stacks.
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    return optimizer


def _matrices(stack: Tensor) -> list[Tensor]:
    """Split a tensor [..., A, B] into views of its matrices [A, B].

    A tensor of one or two dimensions is returned whole, in a list of one.
    """
    if stack.dim() <= 2:
        return [stack]
    return list(stack.flatten(0, -3).unbind(0))


def set_lr(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set each parameter group's learning rate to `share` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak_lr"]


def cosine_with_warmup(step: int, total_steps: int, warmup_steps: int) -> float:
    """Return the learning rate factor: linear warmup, then cosine decay to 0 (paper, appendix B).

    Equals the multiplier of transformers' `get_cosine_schedule_with_warmup`.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / (total_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def heads_weight(
    step: int, total_steps: int, lambda_0: float, schedule: Literal["sine", "linear", "constant"]
) -> float:
    """Return lambda_0(t), the heads' weight for the backbone (paper 2.2.2, 2.3.2, appendix B).

    `sine` is lambda_0 · sin(pi/2 · t/T), which rises slowly enough that untrained heads do not
    disturb the backbone; `linear` is lambda_0 · t/T; `constant` is lambda_0.
    """
    progress = step / total_steps
    if schedule == "sine":
        return lambda_0 * math.sin(math.pi / 2 * progress)
    if schedule == "linear":
        return lambda_0 * progress
    return lambda_0
