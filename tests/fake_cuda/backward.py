"""`Tensor.backward` on fake devices, where torch's own engine asks for a real accelerator.

Runs the graph in the engine's order: later operations first. Saved tensors of an operation are
freed once its backward has run. Hooks on tensors and nodes are not called.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import compress

import torch


class _Saved:
    """A tensor that forward saved."""

    def __init__(self, tensor):
        self.tensor = tensor


_read = []  # by the node that runs


@contextmanager
def saved_tensors_freed():
    """Context manager: forwards save their tensors so that `run_backward` can free them."""

    def unpack(saved):
        assert saved.tensor is not None, "backward runs a second time"
        _read.append(saved)
        return saved.tensor

    with torch.autograd.graph.saved_tensors_hooks(_Saved, unpack):
        yield


@torch.no_grad()
def run_backward(loss, gradient=None):
    """`loss.backward(gradient)`."""
    if gradient is None:
        gradient = torch.ones_like(loss)
    waiting = {loss.grad_fn: {0: gradient}}  # by output
    while waiting:
        node = max(waiting, key=lambda node: node._sequence_nr())
        for (into, number), grad in _gradients(node, waiting.pop(node)):
            output = into._input_metadata[number]
            assert grad.device == output.device
            grad = grad.sum_to_size(output.shape).to(output.dtype)  # of a broadcast output
            if not hasattr(into, "variable"):
                grads = waiting.setdefault(into, {})
                grads[number] = grads[number] + grad if number in grads else grad
            elif into.variable.grad is None:
                into.variable.grad = grad
            else:
                into.variable.grad.add_(grad)


def _gradients(node, grads):
    """The edges of a node that require a gradient, and their gradients."""
    _read.clear()
    edges = node.next_functions
    given = [grads.get(number) for number in range(len(node._input_metadata))]
    if hasattr(node, "needs_input_grad"):  # a custom function
        found, wanted = node.apply(*given), node.needs_input_grad
    else:
        found, wanted = node(*given), [into is not None for into, _ in edges]
    if not isinstance(found, tuple):
        found = (found,)
    for saved in _read:
        saved.tensor = None
    _read.clear()
    edges = [edge for edge in edges if edge[0] is not None]
    pairs = zip(edges, compress(found, wanted), strict=True)
    return [(edge, grad) for edge, grad in pairs if grad is not None]
