"""bitsandbytes' 8-bit AdamW over parameters that are stacked over the heads.

Its CUDA kernels count elements in 32 bits: five lm_heads of a 128k vocabulary in one tensor (2.6e9)
would overflow. So each matrix of a stack is a parameter to it, a view that shares the stack's
memory.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit
from torch import Tensor, nn


class SlicedAdamW8bit(AdamW8bit):
    """AdamW with 8-bit moments, one matrix at a time."""

    def __init__(self, groups: list[dict[str, Any]]):
        self._stacks: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        sliced = []
        for group in groups:
            stacks = [
                (stack, [nn.Parameter(view) for view in _matrices(stack.detach())])
                for stack in group["params"]
            ]
            self._stacks += stacks
            sliced.append({**group, "params": [view for _, views in stacks for view in views]})
        super().__init__(sliced)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for stack, views in self._stacks:
            gradients = _matrices(stack.grad) if stack.grad is not None else [None] * len(views)
            for view, gradient in zip(views, gradients, strict=True):
                view.grad = gradient
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for stack, _ in self._stacks:
            stack.grad = None


def _matrices(stack: Tensor) -> list[Tensor]:
    """Views of a stack's matrices: [..., A, B] as many [A, B]; a single one as it is."""
    return list(stack.flatten(0, -3).unbind(0)) if stack.dim() > 2 else [stack]
