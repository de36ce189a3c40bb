"""Heads that train split over the workers: each keeps a part of every matrix's rows, its gradient and its moments.

A parameter is whole for as long as it is read: an lm_head one head at a time within the loss (`heads/losses.py`), the
others while the heads' states are computed and what backward keeps of them. Their gradients are summed over the workers
part by part. A kind of heads knows nothing of it: what is split are its named parameters of two dimensions or more, by
the last but one. The weights are those of whole heads: on a CPU, with two workers, bit for bit.

Micro-batches that accumulate do so whole, as they do in whole heads, and are summed over the workers in the last: any
other order of sums would round otherwise.

Letters: N workers, R rows of a part, V rows of all, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeline.heads.kind import Heads
from pipeline.training.task import Workers


class RowsOverWorkers:
    """How the rows of one parameter are split: equally many on each worker, the last ones' filled up with zeros."""

    def __init__(self, num_rows: int, workers: Workers):
        self.num_rows, self.workers = num_rows, workers
        self.rows_each = -(-num_rows // workers.world_size)
        self.accumulates = False  # whether more micro-batches of this step follow
        self._held: dict[int, Tensor] = {}  # gradients that accumulate

    def part(self, whole: Tensor) -> Tensor:
        """This worker's rows of all, copied."""
        start = self.workers.rank * self.rows_each
        mine = whole[..., start : start + self.rows_each, :]
        found = mine.new_zeros(*mine.shape[:-2], self.rows_each, mine.shape[-1])
        found[..., : mine.shape[-2], :] = mine
        return found

    def whole(self, part: Tensor) -> Tensor:
        """All rows [..., V, D], of this worker's part [..., R, D] and the others'."""
        parts = self.workers.gather(part)
        return parts.movedim(0, -3).flatten(-3, -2)[..., : self.num_rows, :]

    def zeros(self, part: Tensor) -> Tensor:
        """Room for a gradient of all rows of a part [R, D]: [N·R, D]."""
        return part.new_zeros(self.workers.world_size * self.rows_each, part.shape[-1])

    def padded(self, whole: Tensor) -> Tensor:
        """[..., N·R, D] of [..., V, D], filled up with zeros."""
        missing = self.workers.world_size * self.rows_each - self.num_rows
        return nn.functional.pad(whole, (0, 0, 0, missing)) if missing else whole

    def summed(self, total: Tensor, place: int = 0, out: Tensor | None = None) -> Tensor | None:
        """This worker's part [..., R, D] of the sum of `total` [..., N·R, D] over all, in `out` where that is given.

        None while they accumulate. What `total` held is lost.
        """
        if (held := self._held.pop(place, None)) is not None:
            total = held.add_(total)
        if self.accumulates:
            self._held[place] = total
            return None
        if out is None:
            out = total.new_empty(*total.shape[:-2], self.rows_each, total.shape[-1])
        matrices, parts = (tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (total, out))
        for matrix, part in zip(matrices, parts, strict=True):  # of a stack one at a time: none is copied
            self.workers.sum_parts(matrix.unflatten(0, (-1, self.rows_each)), part)
        return out

    def all_rows(self, row_values: Tensor) -> Tensor:
        """A number for each row of all [..., V], of those for the part's [..., R]."""
        return self.whole(row_values[..., None])[..., 0]


class ShardedHeads:
    """Heads of which this worker holds a part; `shard_heads` makes them.

    `rows` says how each parameter of `heads` that is split is split, by name.
    """

    def __init__(self, heads: Heads, rows: Mapping[str, RowsOverWorkers], workers: Workers):
        self.heads, self.rows, self.workers = heads, rows, workers

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within it, every parameter but the lm_head is whole; every worker enters alike.

        Whole ones are parameters of their own, so that autocast casts each once, as it does where heads are not split.
        Backward hands their gradients on to the parts.
        """
        parts = {name: self.heads.get_parameter(name) for name in self.rows if name != "lm_head"}
        try:
            for name, part in parts.items():
                _put(self.heads, name, self._whole(part, self.rows[name]))
            yield
        finally:
            for name, part in parts.items():
                _put(self.heads, name, part)

    def _whole(self, part: nn.Parameter, rows: RowsOverWorkers) -> nn.Parameter:
        whole = nn.Parameter(rows.whole(part.detach()))

        def hand_on(weight: Tensor) -> None:
            assert weight.grad is not None, "it was accumulated a moment ago"
            gradient, weight.grad = weight.grad, None
            part.grad = rows.summed(rows.padded(gradient))

        whole.register_post_accumulate_grad_hook(hand_on)
        return whole

    def accumulate(self, more: bool) -> None:
        """Whether the next micro-batch is followed by more of the same step."""
        for rows in self.rows.values():
            rows.accumulates = more

    @torch.no_grad()
    def collected(self) -> Heads | None:
        """The whole heads, on the CPU of the first worker; None on the others. Every worker calls it.

        On the device one matrix at a time is whole.
        """
        whole = {name: self._collected(self.heads.get_parameter(name), rows) for name, rows in self.rows.items()}
        if not self.workers.is_first:
            return None
        found = type(self.heads)(self.heads.shape, device=torch.device("meta"))
        tensors = self.heads.state_dict() | whole
        found.load_state_dict({name: tensor.cpu() for name, tensor in tensors.items()}, assign=True)
        if (token_map := self.heads.vocabulary.token_map) is not None:
            found.vocabulary.fill(token_map.cpu())
        return found

    def _collected(self, part: Tensor, rows: RowsOverWorkers) -> Tensor:
        """All rows of a parameter on the first worker's CPU, one matrix at a time; nothing of use on the others."""
        sizes = (*part.shape[:-2], rows.num_rows, part.shape[-1]) if self.workers.is_first else (0, 1, 1)
        found = torch.empty(sizes, dtype=part.dtype)
        for number, matrix in enumerate(part.reshape(-1, *part.shape[-2:])):
            whole = rows.whole(matrix)
            if self.workers.is_first:
                found.view(-1, *whole.shape)[number].copy_(whole)
        return found


def shard_heads(heads: Heads, workers: Workers) -> ShardedHeads:
    """Keep this worker's part of heads that are whole, in place.

    What is frozen, and what has one dimension, stays whole.
    """
    rows: dict[str, RowsOverWorkers] = {}
    parts: dict[int, nn.Parameter] = {}
    for name, parameter in list(heads.named_parameters(remove_duplicate=False)):
        if parameter.requires_grad and parameter.dim() > 1:
            rows[name] = RowsOverWorkers(parameter.shape[-2], workers)
            if id(parameter) not in parts:
                parts[id(parameter)] = nn.Parameter(rows[name].part(parameter.detach()))
            _put(heads, name, parts[id(parameter)])
    heads.split_lm_head = rows.get("lm_head")
    return ShardedHeads(heads, rows, workers)


def _put(heads: Heads, name: str, parameter: nn.Parameter) -> None:
    module, _, last = name.rpartition(".")
    setattr(heads.get_submodule(module), last, parameter)
