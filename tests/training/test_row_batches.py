"""The whole rows that each step reads, and their loading."""

from __future__ import annotations

from itertools import accumulate, chain, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.row_states import RowStates
from pipeline.storage.shards import read_rows
from pipeline.training.feature_batches import Piece, load_batches
from pipeline.training.row_batches import GROUPS, RowPlan
from tests.training.conftest import FINGERPRINT, ROWS_FINGERPRINT, layer_states
from tests.training.trainings import team

lengths_of_groups = st.lists(st.lists(st.integers(0, 40), max_size=6), max_size=12)
settings = {
    "lengths": lengths_of_groups,
    "budget": st.integers(1, 100),
    "seed": st.integers(0, 3),
    "epoch": st.integers(0, 2),
}


def plan_of(
    lengths: list[list[int]],
    budget: int,
    seed: int = 0,
    epoch: int = 0,
    limit: int | None = None,
) -> RowPlan:
    arrays = [np.asarray(group, dtype=np.int64) for group in lengths]
    return RowPlan(arrays, batch_tokens=budget, seed=seed, epoch=epoch, limit=limit)


def all_pieces(plan: RowPlan) -> list[list[Piece]]:
    return [plan.pieces(step) for step in range(plan.num_steps)]


def used_rows(lengths: list[list[int]]) -> list[Piece]:
    found = []
    for group, of_group in enumerate(lengths):
        found += [Piece(group, row, 0, length) for row, length in enumerate(of_group) if length]
    return found


def by_place(pieces: list[Piece]) -> list[Piece]:
    return sorted(pieces, key=lambda piece: (piece.group, piece.row))


@given(**settings)
def test_every_row_comes_whole_once_per_epoch_in_even_steps(lengths, budget, seed, epoch):
    plan, rows = plan_of(lengths, budget, seed, epoch), used_rows(lengths)
    steps = all_pieces(plan)
    assert by_place(list(chain(*steps))) == rows
    total, longest = sum(map(len, rows)), max(map(len, rows), default=0)
    assert len(steps) == min(-(-total // budget), len(rows)) and all(steps)
    equal = total / max(1, len(steps))
    if equal >= longest:
        assert all(abs(sum(map(len, step)) - equal) <= longest for step in steps)


@given(**settings, world_size=st.integers(1, 9))
def test_any_workers_share_the_same_batches_as_whole_rows(lengths, budget, seed, epoch, world_size):
    plan, again = (plan_of(lengths, budget, seed, epoch) for _ in range(2))
    for step in reversed(range(plan.num_steps)):
        shares = [plan.pieces(step, workers) for workers in team(world_size)]
        whole = again.pieces(step)
        assert list(chain(*shares)) == whole
        stops = [plan.share(step, workers)[1] for workers in team(world_size)]
        assert stops == list(accumulate(map(len, shares)))
        equal = sum(map(len, whole)) / world_size
        for share in shares:
            assert abs(sum(map(len, share)) - equal) <= max(map(len, whole))


@pytest.fixture
def rows(shards, row_shards) -> FeatureRows:
    states = RowStates(row_shards, fingerprint=ROWS_FINGERPRINT, layers=(1,))
    usual = {"fingerprint": FINGERPRINT, "num_heads": 3, "roles": ("assistant", "user")}
    return FeatureRows(shards, **usual, row_states=states)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_batch_holds_the_plans_rows_to_their_last_labels(rows, shards, world_size):
    stored = list(chain(*map(read_rows, shards)))
    plan = RowPlan(rows.lengths("train"), batch_tokens=50, seed=3)
    for workers in team(world_size):
        batches = load_batches(rows, plan, range(plan.num_steps), workers, soft_labels=True)
        for step, batch in enumerate(batches):
            place, learned = 0, []
            for piece in plan.pieces(step, workers):
                row = stored[5 * piece.group + piece.row]
                last = max(span["end"] for span in row["spans"] if span["end"] - span["start"] > 1)
                size, ids = last - 2, row["input_ids"]  # head 0's last label is the last token
                here = slice(place, place + size)
                assert torch.equal(batch.rows.states_SX[here], layer_states(ids)[:size])
                assert batch.rows.tokens_S[here].tolist() == ids[1 : size + 1]
                assert set(batch.rows.start_S[here].tolist()) == {place}
                for span in row["spans"]:
                    learned += range(place + span["start"] - 1, place + span["end"] - 2)
                place += size
            assert len(batch.rows.start_S) == place
            assert batch.rows.learned_N.tolist() == learned
            assert torch.equal(batch.rows.tokens_S[batch.rows.learned_N], batch.next_N)
            assert batch.hidden_ND.shape[0] == batch.labels_KN.shape[1] == len(learned)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = set()
    for seed, epoch in product(range(2), range(2)):
        orders.add(tuple(plan_of([[5] * 8] * 40, 20, seed, epoch).pieces(0)))
    assert len(orders) == 4


def test_a_batch_mixes_row_groups_and_opens_few_at_once():
    plan = plan_of([[50] * 80] * 50, budget=4000)
    assert plan.num_steps == 50
    for step, pieces in enumerate(all_pieces(plan)):
        groups = {piece.group for piece in pieces}
        assert GROUPS // 2 <= len(groups) <= 2 * GROUPS
        for workers in team(8):
            assert len({piece.group for piece in plan.pieces(step, workers)}) <= 4


@given(lengths=lengths_of_groups, limit=st.integers(1, 60))
def test_a_limit_plans_only_some_rows(lengths, limit):
    plan, rows = plan_of(lengths, 7, limit=limit), used_rows(lengths)
    found = list(chain(*all_pieces(plan)))
    planned = sum(map(len, found))
    assert set(found) <= set(rows) and len(set(found)) == len(found)
    assert planned >= min(limit, sum(map(len, rows)))
    assert not found or planned - len(found[-1]) < limit
