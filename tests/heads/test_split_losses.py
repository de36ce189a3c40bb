"""A loss of heads that are split over workers is that of whole ones, to the bit, and its sums run while it computes."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED
from pipeline.heads.losses import summed_cross_entropy
from pipeline.heads.soft_labels import TargetHead, Teacher
from pipeline.training.sharded_heads import RowsOverWorkers
from pipeline.training.task import Workers
from tests.fake_cuda.ledger import Ledger

K, N, D, R, V = 3, 37, 16, 10, 19
WEIGHTS = torch.tensor([0.8, 0.5, 0.3])
SEVERAL_CHUNKS, ONE_CHUNK = 700, 5000  # bytes of logits; of the gradient's 19 rows one, or 9, are then a block


class OneOfSome(Workers):
    """The others have the same as this one; what happens is written down."""

    def gather(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return tensor.to(dtype or tensor.dtype).expand(self.world_size, *tensor.shape).contiguous()

    def sum_to(self, rank: int, tensor: torch.Tensor) -> Any:
        return SimpleNamespace(wait=lambda: tensor.mul_(self.world_size))


def case(shape: tuple[int, ...], dtype: torch.dtype, soft: bool):
    """A worker's part of lm_heads, states, labels of all heads but the last, and a teacher."""
    generator = torch.Generator().manual_seed(0)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    labels = torch.randint(V, (K, N), generator=generator)
    labels[torch.rand(K, N, generator=generator) < 0.3] = IGNORED
    labels[2] = IGNORED
    rows = torch.randint(N, (K, N), generator=generator)
    rows[:, ::4] = -1
    teacher = Teacher(TargetHead(draw(V, D)), draw(N, D), rows, 0.5) if soft else None
    return draw(*shape, R, D).float(), draw(K, N, D), labels, teacher


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("chunk_bytes", [SEVERAL_CHUNKS, ONE_CHUNK])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(K,), ()])
def test_a_part_of_the_gradient_is_that_of_whole_lm_heads(shape, dtype, chunk_bytes, soft, micro_batches, rank):
    """Every sum over two workers is twice what each has, which no rounding changes."""
    part, hidden, labels, teacher = case(shape, dtype, soft)
    rows, found = RowsOverWorkers(V, OneOfSome(rank, 2)), []
    whole = torch.cat([part, part], -2)[..., :V, :]
    for lm_head, split in ((whole, None), (part, rows)):
        lm_head, states = lm_head.clone().requires_grad_(), hidden.clone().requires_grad_()
        for left in reversed(range(micro_batches)):
            rows.accumulates = left > 0
            settings = {"weights_K": WEIGHTS, "split": split, "chunk_bytes": chunk_bytes}
            sums = summed_cross_entropy(states, lm_head, labels.roll(left, 1), teacher, **settings)
            (WEIGHTS * sums).sum().backward()
        found.append((sums, states.grad, lm_head.grad))
    (sums, of_states, of_whole), (split_sums, of_split_states, of_part) = found
    assert torch.equal(sums, split_sums) and torch.equal(of_states, of_split_states)
    mine = 2 * of_whole[..., rank * R : (rank + 1) * R, :]
    assert torch.equal(of_part[..., : mine.shape[-2], :], mine)
    assert not of_part[..., mine.shape[-2] :, :].any(), "rows that fill up the last part"


@pytest.mark.parametrize("soft", [False, True])
def test_no_gradient_of_a_split_lm_head_is_whole_where_one_chunk_has_its_rows(soft):
    """With soft labels, also of rows that no state teaches."""
    part, hidden, labels, teacher = case((K,), torch.bfloat16, soft)
    part, rows = part.requires_grad_(), RowsOverWorkers(V, OneOfSome(0, 2))
    largest = []
    for chunk_bytes in (ONE_CHUNK, SEVERAL_CHUNKS):
        with Sizes() as made:
            summed_cross_entropy(hidden, part, labels, teacher, WEIGHTS, split=rows, chunk_bytes=chunk_bytes)
        largest.append(max(numel for numel, dtype in made.shapes if dtype is torch.float32))
    assert largest[0] < V * D <= largest[1]


class Sizes(Ledger):
    """Notes the matrices that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, torch.dtype]] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(operator, types, args, kwargs)
        if isinstance(made, torch.Tensor) and made.dim() == 2 and made.shape[1] == D:
            self.shapes.append((made.numel(), made.dtype))
        return made


def test_a_block_is_summed_while_the_next_one_is_made_and_no_third_is_held():
    happened: list[str] = []
    made: list[weakref.ref[torch.Tensor]] = []

    class Watched(OneOfSome):
        def sum_to(self, rank: int, tensor: torch.Tensor) -> Any:
            number = int(tensor[0, 0])
            happened.append(f"begin {number}")
            return SimpleNamespace(wait=lambda: happened.append(f"wait {number}"))

    def blocks():
        for number in range(3):
            assert sum(block() is not None for block in made) <= 1
            happened.append(f"make {number}")
            block = torch.full((4, D), float(number))
            made.append(weakref.ref(block))
            yield block
            del block

    RowsOverWorkers(12, Watched(0, 1)).summed(blocks(), torch.empty(12, D))
    expected = "make 0, begin 0, make 1, begin 1, wait 0, make 2, begin 2, wait 1, wait 2"
    assert happened == expected.split(", ")


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 9), st.data())
def test_each_row_of_blocks_of_any_size_is_summed_on_the_worker_that_has_it(num_rows, num_workers, block_rows, data):
    rank = data.draw(st.integers(0, num_workers - 1))
    rows = RowsOverWorkers(num_rows, OneOfSome(rank, num_workers))
    total = torch.arange(num_rows * 2.0).view(num_rows, 2)
    part = rows.part(total)
    found = rows.summed(total.clone().split(block_rows), torch.full_like(part, torch.nan))
    assert torch.equal(found, num_workers * part)
