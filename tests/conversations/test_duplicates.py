"""Duplicates, near-duplicates, the check's questions, and mixtures by weight."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from pipeline.config import SeedSource
from pipeline.conversations.conversation import Conversation, Message, Reason, RejectedRow
from pipeline.conversations.duplicates import CheckQuestions, Deduplicator
from pipeline.conversations.sources import Row, SourceReader, mix_sources

WORDS = [f"word{n}" for n in range(500)]


def asks(text: str, id: str = "s:0") -> Conversation:
    return Conversation(id, (Message("user", text),))


def test_the_same_messages_are_a_duplicate_across_sources():
    """Roles, calls and offered tools count; ids do not."""

    def messages(role="assistant", city="Rome"):
        call = json.dumps([{"name": "weather", "arguments": {"city": city}}])
        asked = Message("user", "Rain?"), Message("assistant", "", call), Message("tool", "No.")
        return (*asked, Message(role, "So."))

    seen = Deduplicator("passthrough")
    for conversation in (
        Conversation("a:0", messages(), "x"),
        Conversation("a:1", messages("user")),
        Conversation("a:2", messages(city="Oslo")),
        Conversation("a:3", messages(), tools='["other"]'),
    ):
        assert seen.check(conversation) is conversation
    again = seen.check(Conversation("b:0", messages(), "y", "writing"))
    assert (again.id, again.reason) == ("b:0", Reason.DUPLICATE) and "a:0" in again.detail


SKY = "Why is the sky blue and the sun so red when the day comes to its end"


@pytest.mark.parametrize(
    ("near", "first", "second", "rejected"),
    [
        ("keep", SKY, SKY.upper() + "!", False),
        ("quarantine", SKY, SKY.upper() + "!", True),
        ("quarantine", SKY, SKY + " indeed", False),
    ],
)
def test_nearness_decides_which_prompts_are_the_same(near, first, second, rejected):
    seen = Deduplicator("replay", near=near)
    earlier = asks(first, "a:0")
    assert seen.check(earlier) is earlier
    outcome = seen.check(asks(second, "a:1"))
    assert isinstance(outcome, RejectedRow) == rejected
    assert not rejected or (outcome.reason is Reason.DUPLICATE and "a:0" in outcome.detail)


QUESTION = "Compose an engaging travel blog post about a recent trip to Hawaii"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (QUESTION, True),
        (f"Please: {QUESTION.upper()}?! Thanks.", True),
        (QUESTION.replace("Hawaii", "Rome"), False),
        (QUESTION.replace(" a recent", ",\n a  recent"), True),
        ("why", True),
        ("Why? Because.", False),  # a short question counts as a whole message alone
    ],
)
def test_a_question_of_the_check_is_found_in_any_turn(text, held):
    check = CheckQuestions([asks(QUESTION, "bench:7"), asks("Why?", "bench:8")])
    for messages in ([Message("user", text)], [Message("user", "Hi."), Message("assistant", text)]):
        outcome = check.check(Conversation("s:0", tuple(messages)))
        assert isinstance(outcome, RejectedRow) == held
        assert not held or (outcome.reason is Reason.CONTAMINATED and "bench:" in outcome.detail)


@pytest.mark.parametrize(("length", "held"), [(7, False), (8, True)])
def test_a_question_within_a_text_needs_eight_words(length, held):
    question = " ".join(WORDS[:length])
    outcome = CheckQuestions([asks(question, "bench:1")]).check(asks(f"so {question} then"))
    assert isinstance(outcome, RejectedRow) == held


def reject_odd(row: Row) -> Row:
    """Reject the third source's rows of odd numbers."""
    if re.fullmatch(r"s2:\d*[13579]", row.id):
        return RejectedRow(row.id, Reason.DUPLICATE, "", None)
    return row


def mixed_ids(folder: Path, sizes: list[int], weights: list[float | None]) -> list[str]:
    """The ids of kept rows of sources; each fifth row of the second one is broken."""
    readers = []
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        path = folder / f"{number}.jsonl"
        lines = [f'"{number}-{row}"' for row in range(size)]
        if number == 1:
            lines[4::5] = ["{broken"] * (size // 5)
        path.write_text("\n".join(lines))
        source = SeedSource(path=path, weight=weight)
        readers.append(SourceReader(source, f"s{number}"))
    rows = list(mix_sources(readers, reject_odd))
    assert len({row.id for row in rows}) == len(rows)
    return [row.id for row in rows if isinstance(row, Conversation)]


def test_sources_are_mixed_by_weight_until_one_has_no_more(tmp_path):
    """The shares of kept rows are right up to fewer than there are sources, at every moment."""
    weights = [3.0, 1.0, 0.5]
    ids = mixed_ids(tmp_path, [400, 100, 400], weights)
    names = [id.partition(":")[0] for id in ids]
    for end in range(1, len(names) + 1):
        for number, weight in enumerate(weights):
            share = Fraction(weight) / Fraction(sum(weights)) * end
            assert abs(names[:end].count(f"s{number}") - share) < len(weights)
    # The smallest of 1/3, 2/3, …, of 1, 2, … and of 2, 4, …; ties go to the first source.
    assert "".join(names[:9]) == "s0s0s0s1s0s0s0s1s2"
    assert names.count("s1") == 80


def test_without_weights_every_source_is_read_whole(tmp_path):
    ids = mixed_ids(tmp_path, [4, 6], [None, None])
    assert ids == [*(f"s0:{n}" for n in range(4)), *(f"s1:{n}" for n in (0, 1, 2, 3, 5))]
