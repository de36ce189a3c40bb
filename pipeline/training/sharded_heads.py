"""Heads that train split over the workers: each keeps a part of every matrix's rows, its gradient and its moments.

A parameter is whole for as long as it is read: an lm_head one head at a time within the loss (`heads/losses.py`), the
others while the heads' states are computed and what backward keeps of them. Their gradients are summed over the workers
part by part, an lm_head's by blocks of its rows, each while the next one is computed. A kind of heads knows nothing of
it: what is split are its named parameters of two dimensions or more, by the last but one. The weights are those of
whole heads: on a CPU, with two workers, bit for bit.

Micro-batches that accumulate do so whole, as they do in whole heads, and are summed over the workers in the last: any
other order of sums would round otherwise.

Letters: N workers, R rows of a part, V rows of all, D columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import Work

from pipeline.heads.kind import Heads
from pipeline.training.task import Workers


class _Sum(NamedTuple):
    """Rows that are summed on one worker; where they go on this one, None if it is another."""

    work: Work
    rows: Tensor
    to: Tensor | None


def _finish(sums: Iterable[_Sum]) -> None:
    for each in sums:
        each.work.wait()
        if each.to is not None:
            each.to.copy_(each.rows)


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

    def whole(self, part: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """All rows [..., V, D], of this worker's part [..., R, D] and the others', in a dtype."""
        parts = self.workers.gather(part, dtype)
        return parts.movedim(0, -3).flatten(-3, -2)[..., : self.num_rows, :]

    def summed(self, blocks: Iterable[Tensor], out: Tensor, place: int = 0) -> Tensor | None:
        """This worker's part of a sum over all workers, to `out` [R, D]; of blocks of its V rows, in order.

        A block is summed while the next one is made, and what it held is lost. None while micro-batches accumulate,
        each `place` for itself.
        """
        held, start, in_flight = self._held.pop(place, None), 0, deque[list[_Sum]]()
        if held is None and self.accumulates:
            held = out.new_zeros(self.num_rows, out.shape[-1])
        for block in blocks:
            total = block if held is None else held[start : start + len(block)].add_(block)
            if not self.accumulates:
                in_flight.append(self._begin(total, start, out))
            if len(in_flight) > 1:
                _finish(in_flight.popleft())
            start += len(block)
            del block, total  # what is in flight is all that is held while the next one is made
        if self.accumulates:
            assert held is not None
            self._held[place] = held
            return None
        for begun in in_flight:
            _finish(begun)
        out[max(0, self.num_rows - self.workers.rank * self.rows_each) :] = 0
        return out

    def summed_stack(self, wholes: Tensor, part: Tensor) -> Tensor | None:
        """The same of a stack of matrices [..., V, D], one at a time, of the shape of `part` [..., R, D]."""
        found = torch.empty_like(part)
        matrices = zip(*(tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (wholes, found)), strict=True)
        sums = [self.summed([whole], out, place) for place, (whole, out) in enumerate(matrices)]
        return None if None in sums else found

    def _begin(self, block: Tensor, start: int, out: Tensor) -> list[_Sum]:
        """Begin to sum rows from `start` on, each on the worker that has it."""
        found, first = [], start
        while first < start + len(block):
            owner, place = divmod(first, self.rows_each)
            rows = block[first - start : first - start + self.rows_each - place]
            mine = out[place : place + len(rows)] if owner == self.workers.rank else None
            found.append(_Sum(self.workers.sum_to(owner, rows), rows, mine))
            first += len(rows)
        return found

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
            part.grad = rows.summed_stack(gradient, part)

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
