"""`Tensor.backward` on fake devices, where torch's own engine asks for a real accelerator.

Walks the graph as the engine does: later operations first, gradients of leaves as soon as they are
there. What forward saved for an operation is freed once its backward has run. Hooks on tensors and
nodes are not called.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class _Saved:
    """A tensor that forward saved."""

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor


_read: list[_Saved] = []  # by the node that runs


@contextmanager
def saved_tensors_freed() -> Iterator[None]:
    """Forwards within it save their tensors so that `walk_backward` can free them."""

    def unpack(saved: _Saved) -> Tensor:
        assert saved.tensor is not None, "backward runs a second time"
        _read.append(saved)
        return saved.tensor

    with torch.autograd.graph.saved_tensors_hooks(_Saved, unpack):
        yield


@torch.no_grad()
def walk_backward(loss: Tensor, gradient: Tensor | None = None) -> None:
    """`loss.backward(gradient)`."""
    root = loss.grad_fn
    waiting = _num_uses(root)
    grads: dict[Any, list[Tensor | None]] = {
        root: [torch.ones_like(loss) if gradient is None else gradient]
    }
    order = itertools.count()
    ready = [(0, next(order), root)]
    while ready:
        *_, node = heapq.heappop(ready)
        found = _run(node, grads.pop(node))
        for (into, number), grad in zip(_edges(node), found, strict=True):
            if grad is not None:
                _add(
                    grads.setdefault(into, []), number, _fitted(grad, into._input_metadata[number])
                )
            waiting[into] -= 1
            if not waiting[into] and into in grads:
                is_leaf = hasattr(into, "variable")
                heapq.heappush(
                    ready, (-(1 << 62) if is_leaf else -into._sequence_nr(), next(order), into)
                )


def _num_uses(root: Any) -> Counter[Any]:
    uses: Counter[Any] = Counter()
    seen, open_nodes = {root}, [root]
    while open_nodes:
        for into, _ in _edges(open_nodes.pop()):
            uses[into] += 1
            if into not in seen:
                seen.add(into)
                open_nodes.append(into)
    return uses


def _edges(node: Any) -> list[tuple[Any, int]]:
    return [(into, number) for into, number in node.next_functions if into is not None]


def _run(node: Any, grads: list[Tensor | None]) -> list[Tensor | None]:
    """The gradients for the node's edges."""
    if hasattr(node, "variable"):
        (grad,) = grads
        node.variable.grad = grad if node.variable.grad is None else node.variable.grad.add_(grad)
        return []
    _read.clear()
    is_custom = hasattr(node, "needs_input_grad")
    found = node.apply(*grads) if is_custom else node(*grads)
    found = found if isinstance(found, tuple) else (found,)
    for saved in _read:
        saved.tensor = None
    _read.clear()
    kept = (
        node.needs_input_grad
        if is_custom
        else [into is not None for into, _ in node.next_functions]
    )
    return list(itertools.compress(found, kept))


def _fitted(grad: Tensor, output: Any) -> Tensor:
    """The gradient as the forward's output was; one of an output that was broadcast is summed, as
    the engine does.
    """
    assert grad.device == output.device, (
        f"a gradient on {grad.device} of a tensor on {output.device}"
    )
    return grad.sum_to_size(output.shape).to(output.dtype)


def _add(grads: list[Tensor | None], number: int, grad: Tensor) -> None:
    grads.extend([None] * (number + 1 - len(grads)))
    old = grads[number]
    grads[number] = grad if old is None else old + grad
