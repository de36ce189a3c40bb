"""The positions that each step reads, and their loading ahead of it."""

from __future__ import annotations

import threading
from itertools import accumulate, chain, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.training.feature_batches import LANES, EpochPlan, Piece, load_batches
from tests.training.conftest import FINGERPRINT, STATES
from tests.training.trainings import team

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
    found = []
    for piece in pieces:
        found += [(piece.group, piece.row, place) for place in range(piece.start, piece.stop)]
    return found


def all_positions(plan: EpochPlan) -> list[tuple[int, int, int]]:
    return [place for step in range(plan.num_steps) for place in positions(plan.pieces(step))]


@given(**settings)
def test_every_position_comes_once_per_epoch_in_even_batches(lengths, budget, seed, epoch):
    """Batches keep to the budget, give or take one position per lane."""
    plan = plan_of(lengths, budget, seed, epoch)
    expected = []
    for group, rows in enumerate(lengths):
        for row, length in enumerate(rows):
            expected += [(group, row, place) for place in range(length)]
    assert sorted(all_positions(plan)) == expected and plan.num_positions == len(expected)
    sizes = [len(positions(plan.pieces(step))) for step in range(plan.num_steps)]
    assert all(0 < size < budget + LANES for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= LANES


@given(**settings, world_size=st.integers(1, 40))
def test_any_workers_share_the_same_batches_equally(lengths, budget, seed, epoch, world_size):
    plan, again = (plan_of(lengths, budget, seed, epoch) for _ in range(2))
    for step in reversed(range(plan.num_steps)):
        shares = [positions(plan.pieces(step, workers)) for workers in team(world_size)]
        assert list(chain(*shares)) == positions(again.pieces(step))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        stops = [plan.share(step, workers)[1] for workers in team(world_size)]
        assert stops == list(accumulate(sizes))


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = set()
    for seed, epoch in product(range(2), range(2)):
        orders.add(tuple(plan_of([[5] * 8] * 40, 80, seed, epoch).pieces(0)))
    assert len(orders) == 4


def test_a_batch_mixes_row_groups_and_opens_few_at_once():
    plan = plan_of([[50] * 10] * 200, budget=1600)
    for step in range(plan.num_steps):
        groups = {piece.group for piece in plan.pieces(step)}
        assert LANES // 2 <= len(groups) <= 2 * LANES


@given(lengths=lengths_of_groups, limit=st.integers(1, 60))
def test_a_limit_plans_only_some_positions(lengths, limit):
    plan = plan_of(lengths, 7, limit=limit)
    seen = all_positions(plan)
    assert len(seen) == len(set(seen)) == plan.num_positions == min(limit, sum(map(sum, lengths)))


@pytest.fixture
def rows(shards) -> FeatureRows:
    return FeatureRows(
        shards,
        fingerprint=FINGERPRINT,
        num_heads=3,
        roles=("assistant", "user"),
    )


@pytest.fixture
def plan(rows) -> EpochPlan:
    return EpochPlan(rows.lengths("train"), batch_tokens=50, seed=3)


def test_a_batch_holds_the_plans_positions_without_padding(rows, plan):
    batches = list(load_batches(rows, plan, range(plan.num_steps)))
    assert len(batches) == plan.num_steps > 3
    for step, batch in enumerate(batches):
        hidden, following, labels = [], [], []
        for piece in plan.pieces(step):
            row = rows.read_group(piece.group)[piece.row]
            taken = slice(piece.start, piece.stop)
            hidden.append(row.hidden_ND[row.learnable[taken]])
            following += row.next_N[taken].tolist()
            labels += row.labels_KN[:, taken].T.tolist()
        assert torch.equal(batch.hidden_ND, torch.cat(hidden))
        assert batch.next_N.tolist() == following and batch.labels_KN.T.tolist() == labels
        assert (batch.labels_KN[0] >= 0).all() and batch.teacher_MD.numel() == 0


@pytest.mark.parametrize("world_size", [1, 3])
def test_soft_labels_come_with_the_state_that_predicts_them(rows, plan, world_size):
    """Also where a row is cut between batches or workers."""
    for workers in team(world_size):
        steps = range(plan.num_steps)
        plain = load_batches(rows, plan, steps, workers=workers)
        for batch in load_batches(rows, plan, steps, workers=workers, soft_labels=True):
            labelled = batch.labels_KN >= 0
            assert torch.equal(batch.teacher_KN >= 0, labelled)
            states = batch.teacher_MD[batch.teacher_KN[labelled]]
            assert torch.equal(states, STATES[batch.labels_KN[labelled]])
            assert torch.equal(batch.hidden_ND, next(plain).hidden_ND)


def test_a_loop_that_stops_early_leaves_no_thread_behind(rows, plan):
    before = threading.active_count()
    batches = load_batches(rows, plan, range(plan.num_steps))
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before
