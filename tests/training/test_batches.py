from __future__ import annotations

import threading

import pytest
import torch

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.errors import DataError
from pipeline.training.batches import load_batches
from pipeline.training.epochs import EpochPlan

V, D, K, FINGERPRINT = 40, 32, 3, "f" * 64


@pytest.fixture
def rows(shards) -> FeatureRows:
    return FeatureRows(
        shards, fingerprint=FINGERPRINT, hidden_size=D, vocab_size=V, num_heads=K, roles=("assistant", "user")
    )


@pytest.fixture
def plan(rows) -> EpochPlan:
    return EpochPlan(rows.lengths("train"), batch_tokens=50, seed=3)


def test_a_batch_holds_the_plans_positions_end_to_end_without_padding(rows, plan):
    batches = list(load_batches(rows, plan, range(plan.num_steps)))
    assert len(batches) == plan.num_steps > 3
    for step, batch in enumerate(batches):
        pieces = plan.pieces(step)
        taken = [(rows.read_group(piece.group)[piece.row], slice(piece.start, piece.stop)) for piece in pieces]
        expected = torch.cat([row.hidden_ND[row.learnable[part]] for row, part in taken])
        labels = torch.cat([torch.from_numpy(row.labels_KN[:, part]) for row, part in taken], 1)
        assert torch.equal(batch.hidden_ND, expected) and torch.equal(batch.labels_KN, labels.long())
        following = torch.cat([torch.from_numpy(row.next_N[part]) for row, part in taken])
        assert torch.equal(batch.next_N, following.long())
        assert (batch.labels_KN[0] >= 0).all()


def test_a_resume_reads_on_at_any_step(rows, plan):
    whole = list(load_batches(rows, plan, range(plan.num_steps)))
    rest = list(load_batches(rows, plan, range(2, plan.num_steps)))
    assert len(rest) == len(whole) - 2
    assert all(torch.equal(a.hidden_ND, b.hidden_ND) for a, b in zip(whole[2:], rest, strict=True))


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_workers_shares_make_up_the_batch(rows, plan, world_size):
    shares = [load_batches(rows, plan, range(3), rank=r, world_size=world_size) for r in range(world_size)]
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
