"""Gradients over the workers: summed while backward still runs, and the norm that they are clipped by.

Small gradients are summed in buckets, a large one by itself. Buckets start in one order, that of the parameters, on
every worker, whatever order backward finishes them in: sums are the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.training.task import Workers

BUCKET_BYTES = 32 << 20
IN_FLIGHT = 8  # buckets that are summed at once: what their copies take is bounded

AllRows = Callable[[str, Tensor], Tensor]


class GradientSum:
    """Sums gradients over the workers during the last backward of a step.

    Args:
        parameters: In the order in which backward finishes them, as far as that is known.
        workers: With one there is nothing to sum.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], workers: Workers, bucket_bytes: int = BUCKET_BYTES):
        self._parameters = list(parameters)
        self._several = workers.world_size > 1
        self._group: dist.ProcessGroup | None = None
        self._buckets = list(_buckets(self._parameters, bucket_bytes))
        self._bucket_of = {id(weight): number for number, bucket in enumerate(self._buckets) for weight in bucket}
        self._missing: list[int] = []  # gradients of each bucket that backward has yet to finish; empty when idle
        self._next = 0  # the bucket to start next
        self._pending: list[tuple[list[nn.Parameter], Tensor, dist.Work]] = []
        if self._several:
            for weight in self._parameters:
                weight.register_post_accumulate_grad_hook(self._finished)

    def begin(self) -> None:
        """The backward that follows is the step's last: what it finishes is final."""
        if self._several and self._group is None:
            # Of its own: layers that are gathered during the same backward have an order of their own.
            self._group = dist.new_group()
        self._missing, self._next = [len(bucket) for bucket in self._buckets], 0

    def finish(self) -> None:
        """Sum what is left, and wait for all. A gradient that no backward has made is zero."""
        self._missing = []
        for weight in self._parameters:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        while self._several and self._next < len(self._buckets):
            self._start()
        while self._pending:
            self._take()

    def _finished(self, weight: nn.Parameter) -> None:
        """Backward has this gradient: start every bucket whose turn it is."""
        if not self._missing:
            return
        self._missing[self._bucket_of[id(weight)]] -= 1
        while self._next < len(self._buckets) and not self._missing[self._next]:
            self._start()

    def _start(self) -> None:
        bucket = self._buckets[self._next]
        self._next += 1
        if len(self._pending) == IN_FLIGHT:
            self._take()
        grads = [weight.grad for weight in bucket if weight.grad is not None]
        flat = grads[0] if len(grads) == 1 else torch.cat([grad.flatten() for grad in grads])
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        assert work is not None, "every worker is in the group"
        self._pending.append((bucket, flat, work))

    def _take(self) -> None:
        """Wait for the bucket that started first, and put its sums where they belong."""
        bucket, flat, work = self._pending.pop(0)
        work.wait()
        if len(bucket) > 1:
            for weight, total in zip(bucket, flat.split([weight.numel() for weight in bucket]), strict=True):
                assert weight.grad is not None
                weight.grad.copy_(total.view_as(weight))


def _buckets(parameters: Sequence[nn.Parameter], most: int) -> Iterator[list[nn.Parameter]]:
    """Parameters that follow one another, as many as have gradients of so many bytes; at least one."""
    bucket: list[nn.Parameter] = []
    held = 0
    for weight in parameters:
        if bucket and (held + weight.nbytes > most or weight.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(weight)
        held += weight.nbytes
    if bucket:
        yield bucket


@torch.no_grad()
def clip_gradients(
    parameters: Mapping[str, nn.Parameter], most: float, all_rows: AllRows = lambda _, rows: rows
) -> Tensor:
    """Scale gradients so that their norm over all parameters is at most `most`; returns the norm before, in fp64.

    Squares are summed row by row, then over rows in one order: the norm is the same to the bit where each worker holds
    some of the rows. With one worker torch's own is faster.

    Args:
        all_rows: Given a parameter's name and a number for each of its rows here, [..., rows], those of all its rows.
    """
    norms = ((name, torch.linalg.vector_norm(_grad(weight), dim=-1)) for name, weight in parameters.items())
    norm = torch.stack([all_rows(name, rows).double().square().sum() for name, rows in norms]).sum().sqrt()
    scale = (most / (norm + 1e-6)).clamp(max=1.0).float()
    for weight in parameters.values():
        _grad(weight).mul_(scale.to(weight.dtype))
    return norm


def _grad(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None, "every gradient is there"
    return weight.grad
