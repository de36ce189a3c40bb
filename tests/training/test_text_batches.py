from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED, Span
from pipeline.errors import DataError
from pipeline.storage.shards import read_rows
from pipeline.training.text_batches import Text, TextPlan, assemble_texts, pack, read_texts

K = 3
lengths_of_texts = st.lists(st.integers(0, 40), max_size=60)


def text(length: int, *spans: tuple[int, int], num_read: int | None = None, first: int = 0) -> Text:
    ids = np.arange(first, first + length, dtype=np.int32)
    num_read = spans[-1][1] - 1 if num_read is None else num_read
    return Text(ids, tuple(Span(start, end, "assistant") for start, end in spans), num_read)


def opened(texts, **more):
    settings = {
        "fingerprint": "9" * 64,
        "vocab_size": 40,
        "roles": ("assistant",),
        "sequence_length": 64,
    }
    return read_texts(texts, **{**settings, **more})


@given(lengths=lengths_of_texts)
def test_packing_places_every_text_once_and_no_sequence_is_too_long(lengths):
    groups = pack(lengths, 40)
    assert Counter(index for group in groups for index in group) == Counter(
        i for i, length in enumerate(lengths) if length
    )
    assert all(0 < sum(lengths[index] for index in group) <= 40 for group in groups)


@given(lengths=lengths_of_texts)
def test_packing_is_dense(lengths):
    """No two sequences would fit into one, so that more than half of all is filled."""
    fills = sorted(sum(lengths[index] for index in group) for group in pack(lengths, 40))
    assert len(fills) < 2 or fills[0] + fills[1] > 40


@given(
    lengths=lengths_of_texts,
    budget=st.integers(1, 9),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
def test_every_sequence_comes_once_per_epoch_whoever_shares_the_steps(
    lengths, budget, world_size, epoch
):
    plan = plan_of(lengths, budget)
    seen: Counter[tuple[int, ...]] = Counter()
    for step in range(plan.steps_per_epoch):
        shares = [plan.sequences(epoch, step, rank, world_size) for rank in range(world_size)]
        whole = [sequence for share in shares for sequence in share]
        assert whole == plan.sequences(epoch, step) and len(whole) <= budget
        assert [number for number, _ in whole] == list(range(len(whole)))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert plan.largest_share(step, world_size) == max(map(len, shares))
        seen.update(tuple(group) for _, group in whole)
    assert seen == Counter(tuple(group) for group in plan.groups)


def plan_of(lengths, batch_sequences: int, seed: int = 0) -> TextPlan:
    texts = [text(length + 2, (1, length + 2), num_read=length) for length in lengths]
    return TextPlan(texts, sequence_length=40, batch_sequences=batch_sequences, seed=seed)


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = [
        str(plan_of([30] * 50, 50, seed).sequences(epoch, 0))
        for seed in range(2)
        for epoch in range(2)
    ]
    assert len(set(orders)) == 4


def test_labels_are_the_tokens_that_follow_within_the_span():
    """Two texts in one sequence and one in another, every position by hand; tokens say where they
    are from.
    """
    first, second = text(9, (2, 4), (6, 9)), text(6, (3, 6), first=20)
    third = text(8, (1, 8), num_read=4, first=10)  # cut: labels may lie beyond what is read
    batch = assemble_texts([[first, second], [third]], K)
    assert batch.ids_BT.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 20, 21, 22, 23, 24],
        [10, 11, 12, 13, *[0] * 9],
    ]
    assert batch.positions_BT.tolist() == [[*range(8), *range(5)], [*range(4), *[0] * 9]]
    width = batch.ids_BT.shape[1]
    assert batch.learned_N.tolist() == [1, 2, 5, 6, 7, 10, 11, 12, *range(width, width + 4)]
    assert batch.next_N.tolist() == [2, 3, 6, 7, 8, 23, 24, 25, 11, 12, 13, 14]
    none = IGNORED
    assert batch.labels_KN.tolist() == [
        [3, none, 7, 8, none, 24, 25, none, 12, 13, 14, 15],
        [none, none, 8, none, none, 25, none, none, 13, 14, 15, 16],
        [none] * 8 + [14, 15, 16, 17],
    ]
    no = -1  # no label, or one that is predicted beyond what is read
    assert batch.teacher_KN.tolist() == [
        [1, no, 3, 4, no, 6, 7, no, 9, 10, 11, no],
        [no, no, 4, no, no, 7, no, no, 10, 11, no, no],
        [no] * 8 + [11, no, no, no],
    ]
    taught = batch.teacher_KN >= 0
    assert torch.equal(batch.next_N[batch.teacher_KN[taught]], batch.labels_KN[taught])


@pytest.mark.parametrize("roles", [("assistant",), ("user",), ("assistant", "user")])
@pytest.mark.parametrize("limit", [12, 64])
def test_only_what_the_target_wrote_in_the_chosen_roles_is_learned(texts, roles, limit):
    """Against the rows themselves, position by position."""
    found = opened(texts, roles=roles, sequence_length=limit)
    for split in ("train", "calibrate"):
        rows = [row for path in texts for row in read_rows(path) if row["split"] == split]
        expected = []
        for row in rows:
            spans = [span for span in row["spans"] if span["role"] in roles]
            expected += [
                (row["input_ids"][position], row["input_ids"][position + 1])
                for span in spans
                for position in range(span["start"] - 1, span["end"] - 1)
                if position < limit
            ]
        batch = assemble_texts([[each] for each in found[split] if each.num_read], K)
        read = batch.ids_BT.flatten()[batch.learned_N].tolist()
        assert list(zip(read, batch.next_N.tolist(), strict=True)) == expected
        assert sum(each.num_learned for each in found[split]) == len(expected)
        assert batch.ids_BT.shape[1] <= limit


def test_what_lies_beyond_the_sequence_is_counted(texts):
    whole, cut = (
        opened(texts, roles=("user",), sequence_length=length)["train"] for length in (64, 12)
    )
    assert not sum(each.num_cut for each in whole)
    assert any(each.num_read == 0 for each in cut) and all(
        each.num_learned for each in cut if each.num_read
    )
    learned, left_out = (
        sum(getattr(each, name) for each in cut) for name in ("num_learned", "num_cut")
    )
    assert left_out > 0 and learned + left_out == sum(each.num_learned for each in whole)


def test_a_shard_of_another_run_or_target_is_refused(texts):
    with pytest.raises(DataError, match="another run"):
        opened(texts, fingerprint="8" * 64)
    with pytest.raises(DataError, match="vocabulary of 39"):
        opened(texts, vocab_size=39)


def test_batches_travel_whole():
    batch = assemble_texts([[text(5, (2, 5))]], K).to(torch.device("cpu"))
    assert batch.next_N.tolist() == [2, 3, 4]
