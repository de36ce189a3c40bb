"""Which positions each step reads, and how they are loaded ahead of it."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.errors import DataError
from pipeline.training.epoch_plan import LANES, EpochPlan, Piece
from pipeline.training.feature_batches import load_batches
from tests.training.conftest import STATES

lengths_of_groups = st.lists(st.lists(st.integers(0, 40), max_size=6), max_size=8)
settings = {
    "lengths": lengths_of_groups,
    "budget": st.integers(1, 100),
    "seed": st.integers(0, 3),
    "epoch": st.integers(0, 2),
}


def plan_of(
    lengths: list[list[int]], budget: int, seed: int = 0, epoch: int = 0, limit: int | None = None
) -> EpochPlan:
    arrays = [np.asarray(group, dtype=np.int64) for group in lengths]
    return EpochPlan(arrays, batch_tokens=budget, seed=seed, epoch=epoch, limit=limit)


def positions(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [
        (piece.group, piece.row, position)
        for piece in pieces
        for position in range(piece.start, piece.stop)
    ]


@given(**settings)
def test_every_position_comes_exactly_once_per_epoch(lengths, budget, seed, epoch):
    plan = plan_of(lengths, budget, seed, epoch)
    seen = Counter(p for step in range(plan.num_steps) for p in positions(plan.pieces(step)))
    expected = {
        (g, r, p)
        for g, rows in enumerate(lengths)
        for r, length in enumerate(rows)
        for p in range(length)
    }
    assert set(seen) == expected and set(seen.values()) <= {1}
    assert plan.num_positions == len(expected)


@given(**settings, world_size=st.integers(1, 40))
def test_any_number_of_workers_shares_the_same_batches_equally(
    lengths, budget, seed, epoch, world_size
):
    plan = plan_of(lengths, budget, seed, epoch)
    for step in range(plan.num_steps):
        shares = [positions(plan.pieces(step, rank, world_size)) for rank in range(world_size)]
        assert list(chain(*shares)) == positions(plan.pieces(step))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(**settings)
def test_batches_are_even_and_keep_to_the_budget_give_or_take_one_position_per_lane(
    lengths, budget, seed, epoch
):
    plan = plan_of(lengths, budget, seed, epoch)
    sizes = [len(positions(plan.pieces(step))) for step in range(plan.num_steps)]
    assert all(0 < size < budget + LANES for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= LANES


@given(**settings)
def test_a_plan_is_a_pure_function_of_its_arguments(lengths, budget, seed, epoch):
    one, other = plan_of(lengths, budget, seed, epoch), plan_of(lengths, budget, seed, epoch)
    assert one.num_steps == other.num_steps
    assert all(one.pieces(step) == other.pieces(step) for step in reversed(range(one.num_steps)))


def test_epochs_and_seeds_have_orders_of_their_own():
    lengths = [[5] * 8] * 40
    orders = [
        tuple(plan_of(lengths, 80, seed, epoch).pieces(0))
        for seed in range(2)
        for epoch in range(2)
    ]
    assert len(set(orders)) == 4


def test_a_batch_mixes_row_groups_from_all_over_the_data_and_opens_few_at_once():
    plan = plan_of([[50] * 10] * 200, budget=1600)
    for step in range(plan.num_steps):
        groups = {piece.group for piece in plan.pieces(step)}
        assert LANES // 2 <= len(groups) <= 2 * LANES


def test_a_row_longer_than_the_budget_is_cut_between_batches():
    plan = plan_of([[1000]], budget=100)
    assert plan.num_steps == 10
    assert sorted(p for step in range(10) for p in positions(plan.pieces(step))) == [
        (0, 0, i) for i in range(1000)
    ]


def test_each_worker_reads_its_own_row_groups():
    plan, workers = plan_of([[64] * 4] * 64, budget=1024), 4
    read = [
        {p.group for s in range(plan.num_steps) for p in plan.pieces(s, r, workers)}
        for r in range(workers)
    ]
    assert (
        sum(map(len, read)) <= 64 + LANES
    )  # only a group that lies across a lane's edge is read by two


@given(lengths=lengths_of_groups, limit=st.integers(1, 60))
def test_a_limit_plans_so_many_positions_of_the_same_line(lengths, limit):
    plan = plan_of(lengths, 7, limit=limit)
    seen = [p for step in range(plan.num_steps) for p in positions(plan.pieces(step))]
    assert len(seen) == len(set(seen)) == plan.num_positions == min(limit, sum(map(sum, lengths)))


def test_no_data_is_an_epoch_without_steps():
    plan = plan_of([[0, 0], []], budget=4)
    assert (plan.num_steps, plan.num_positions) == (0, 0)
    with pytest.raises(ValueError, match="step 0 of 0"):
        plan.pieces(0)


V, D, K, FINGERPRINT = 40, 32, 3, "f" * 64


@pytest.fixture
def rows(shards) -> FeatureRows:
    return FeatureRows(
        shards,
        fingerprint=FINGERPRINT,
        hidden_size=D,
        vocab_size=V,
        num_heads=K,
        roles=("assistant", "user"),
    )


@pytest.fixture
def plan(rows) -> EpochPlan:
    return EpochPlan(rows.lengths("train"), batch_tokens=50, seed=3)


def test_a_batch_holds_the_plans_positions_end_to_end_without_padding(rows, plan):
    batches = list(load_batches(rows, plan, range(plan.num_steps)))
    assert len(batches) == plan.num_steps > 3
    for step, batch in enumerate(batches):
        pieces = plan.pieces(step)
        taken = [
            (rows.read_group(piece.group)[piece.row], slice(piece.start, piece.stop))
            for piece in pieces
        ]
        expected = torch.cat([row.hidden_ND[row.learnable[part]] for row, part in taken])
        labels = torch.cat([torch.from_numpy(row.labels_KN[:, part]) for row, part in taken], 1)
        assert torch.equal(batch.hidden_ND, expected) and torch.equal(
            batch.labels_KN, labels.long()
        )
        following = torch.cat([torch.from_numpy(row.next_N[part]) for row, part in taken])
        assert torch.equal(batch.next_N, following.long())
        assert (batch.labels_KN[0] >= 0).all()


@pytest.mark.parametrize("world_size", [1, 3])
def test_soft_labels_come_with_the_state_that_says_the_label_within_the_same_row(
    rows, plan, world_size
):
    """Also where a row is cut between batches or workers."""
    for rank in range(world_size):
        shares = {"rank": rank, "world_size": world_size}
        plain = load_batches(rows, plan, range(plan.num_steps), **shares)
        for batch in load_batches(rows, plan, range(plan.num_steps), **shares, soft_labels=True):
            labelled = batch.labels_KN >= 0
            assert torch.equal(batch.teacher_KN >= 0, labelled)
            assert torch.equal(
                batch.teacher_MD[batch.teacher_KN[labelled]], STATES[batch.labels_KN[labelled]]
            )
            assert torch.equal(batch.hidden_ND, next(plain).hidden_ND)


def test_without_soft_labels_nothing_more_is_loaded(rows, plan):
    batch = next(load_batches(rows, plan, range(1)))
    assert batch.teacher_MD is None and batch.teacher_KN is None


def test_a_resume_reads_on_at_any_step(rows, plan):
    whole = list(load_batches(rows, plan, range(plan.num_steps)))
    rest = list(load_batches(rows, plan, range(2, plan.num_steps)))
    assert len(rest) == len(whole) - 2
    assert all(torch.equal(a.hidden_ND, b.hidden_ND) for a, b in zip(whole[2:], rest, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_workers_shares_make_up_the_batch(rows, plan, world_size):
    shares = [
        load_batches(rows, plan, range(3), rank=r, world_size=world_size) for r in range(world_size)
    ]
    for step, batch in enumerate(load_batches(rows, plan, range(3))):
        parts = [next(share) for share in shares]
        assert torch.equal(torch.cat([part.hidden_ND for part in parts]), batch.hidden_ND), step
        assert torch.equal(torch.cat([part.labels_KN for part in parts], 1), batch.labels_KN)


def test_a_row_group_is_read_at_most_twice(rows, plan, monkeypatch):
    read: list[int] = []
    original = rows.read_group
    monkeypatch.setattr(rows, "read_group", lambda group: (read.append(group), original(group))[1])
    list(load_batches(rows, plan, range(plan.num_steps)))
    assert len(read) <= 2 * len(set(read))


def test_an_error_while_reading_ahead_reaches_the_loop(rows, plan, monkeypatch):
    def damaged(_: int):
        raise DataError("A shard of features cannot be read: checksum.", "00000.parquet")

    monkeypatch.setattr(rows, "read_group", damaged)
    with pytest.raises(DataError, match="checksum"):
        next(load_batches(rows, plan, range(plan.num_steps)))


def test_a_loop_that_stops_early_leaves_no_thread_behind(rows, plan):
    before = threading.active_count()
    batches = load_batches(rows, plan, range(plan.num_steps))
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before
