from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.spans import IGNORED, Span
from pipeline.storage.shards import read_rows
from pipeline.training.text_batches import Text, TextPlan, assemble_texts, pack_texts
from tests.training.conftest import opened
from tests.training.trainings import team

K = 3
lengths_of_texts = st.lists(st.integers(1, 50), max_size=60)


def text(length: int, *spans: tuple[int, int], num_read: int | None = None, first: int = 0) -> Text:
    ids = np.arange(first, first + length, dtype=np.int32)
    num_read = spans[-1][1] - 1 if num_read is None else num_read
    return Text(ids, tuple(Span(start, end, "assistant") for start, end in spans), num_read)


def texts_of(lengths) -> list[Text]:
    return [text(length + 2, (1, length + 2), num_read=length) for length in lengths]


def plan_of(lengths, batch_sequences: int, seed: int = 0) -> TextPlan:
    return TextPlan(pack_texts(texts_of(lengths), 40), batch_sequences, seed)


@given(lengths=lengths_of_texts)
def test_packing_places_every_text_once_and_densely(lengths):
    """No two sequences would fit into one, so more than half of all is filled. A text that is
    longer than a sequence stands alone.
    """
    groups = pack_texts(texts_of(lengths), 40)
    placed = sorted(index for group in groups for index in group)
    assert placed == list(range(len(lengths)))
    fills = sorted(sum(lengths[index] for index in group) for group in groups)
    assert all(len(group) == 1 or sum(lengths[index] for index in group) <= 40 for group in groups)
    assert len(fills) < 2 or fills[0] + fills[1] > 40


@given(
    lengths=lengths_of_texts,
    budget=st.integers(1, 9),
    world_size=st.integers(1, 5),
    epoch=st.integers(0, 2),
)
def test_every_sequence_comes_once_per_epoch_on_any_workers(lengths, budget, world_size, epoch):
    plan = plan_of(lengths, budget)
    seen: Counter[tuple[int, ...]] = Counter()
    for step in range(plan.steps_per_epoch):
        shares = [plan.sequences(epoch, step, workers) for workers in team(world_size)]
        whole = [sequence for share in shares for sequence in share]
        assert whole == plan.sequences(epoch, step) and len(whole) <= budget
        assert [number for number, _ in whole] == list(range(len(whole)))
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1 and plan.largest_share(step, world_size) == max(sizes)
        seen.update(tuple(group) for _, group in whole)
    assert seen == Counter(tuple(group) for group in plan.groups)


def test_labels_are_the_tokens_that_follow_within_the_span():
    """Two texts in one sequence and one in another; a text's ids start at 0, 10 or 30."""
    cut = text(8, (1, 8), num_read=4, first=10)  # labels may lie beyond the tokens that are read
    batch = assemble_texts([[text(5, (2, 5)), cut], [text(3, (1, 3), first=30)]], K)
    assert batch.ids_BT.tolist() == [[0, 1, 2, 3, 10, 11, 12, 13], [30, 31, *[0] * 6]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, *[0] * 6]]
    assert batch.learned_N.tolist() == [1, 2, 3, *range(4, 10)]
    assert batch.next_N.tolist() == [2, 3, 4, 11, 12, 13, 14, 31, 32]
    none = IGNORED
    assert batch.labels_KN.tolist() == [
        [3, 4, none, 12, 13, 14, 15, 32, none],
        [4, none, none, 13, 14, 15, 16, none, none],
        [none, none, none, 14, 15, 16, 17, none, none],
    ]
    no = -1  # no label, or one that is predicted beyond the tokens that are read
    assert batch.teacher_KN.tolist() == [
        [1, 2, no, 4, 5, 6, no, 8, no],
        [2, no, no, 5, 6, no, no, no, no],
        [no, no, no, 6, no, no, no, no, no],
    ]


@pytest.mark.parametrize("roles", [("assistant",), ("user",), ("assistant", "user")])
@pytest.mark.parametrize("limit", [12, 64])
def test_target_written_text_of_the_roles_is_learned(texts, roles, limit):
    """Against the rows themselves, position by position."""
    found = opened(texts, roles=roles, sequence_length=limit)["train"]
    expected = []
    for row in (row for path in texts for row in read_rows(path)):
        ids = row["input_ids"]
        for span in row["spans"]:
            if row["split"] == "train" and span["role"] in roles:
                positions = range(span["start"] - 1, span["end"] - 1)
                expected += [(ids[place], ids[place + 1]) for place in positions if place < limit]
    batch = assemble_texts([[each] for each in found], K)
    read = batch.ids_BT.flatten()[batch.learned_N].tolist()
    assert list(zip(read, batch.next_N.tolist(), strict=True)) == expected
    assert sum(each.num_learned for each in found) == len(expected)
    assert batch.ids_BT.shape[1] <= limit
