"""Near-duplicates by MinHash, the check's questions, and mixtures by weight."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import SeedSource
from pipeline.conversations.conversation import Conversation, Message, Reason, RejectedRow
from pipeline.conversations.duplicates import CheckQuestions, Deduplicator
from pipeline.conversations.sources import SourceReader, mixed

WORDS = [f"word{n}" for n in range(500)]


def asks(text: str, id: str = "s:0") -> Conversation:
    return Conversation(id, (Message("user", text),))


def overlap(one: list[str], other: list[str]) -> float:
    """The Jaccard similarity of the sets of three words in a row, counted anew."""
    sets = [{tuple(words[at : at + 3]) for at in range(len(words) - 2)} for words in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_minhash_leaves_out_what_is_similar_and_keeps_what_is_not():
    """300 pairs of a prompt and a changed copy, against the true similarity; five standard errors
    are left between.
    """
    rng = random.Random(0)
    found = {"similar": [], "other": []}
    for number in range(300):
        words = rng.choices(WORDS, k=60)
        copy = list(words)
        for at in rng.sample(range(60), rng.choice((0, 1, 2, 12, 20, 40))):
            copy[at] = rng.choice(WORDS)
        deduplicator = Deduplicator("replay", near="minhash", similarity=0.7)
        assert isinstance(deduplicator.check(asks(" ".join(words))), Conversation)
        outcome = deduplicator.check(asks(" ".join(copy).title() + "!", f"s:{number + 1}"))
        true = overlap(words, copy)
        if true > 0.85 or true < 0.55:
            found["similar" if true > 0.85 else "other"].append(isinstance(outcome, RejectedRow))
    assert len(found["similar"]) > 100 and len(found["other"]) > 100
    assert all(found["similar"]) and not any(found["other"])


def test_a_similar_prompt_names_the_first_and_how_similar_it_is():
    deduplicator = Deduplicator("replay", near="minhash")
    text = " ".join(WORDS[:80])
    assert isinstance(deduplicator.check(asks(text, "a:0")), Conversation)
    refused = deduplicator.check(asks(text + " indeed", "a:1"))
    assert refused.reason is Reason.DUPLICATE and refused.detail.startswith(
        "Similar to a:0: about 0.9"
    )
    for near in ("keep", "quarantine"):
        other = Deduplicator("replay", near=near)
        assert [type(other.check(asks(t, t))) for t in (text, text + " indeed")] == [
            Conversation
        ] * 2


def test_other_calls_or_other_tools_make_another_conversation():
    def calls(id: str, city: str, tools: str) -> Conversation:
        called = json.dumps([{"name": "weather", "arguments": {"city": city}}])
        messages = (
            Message("user", "Rain?"),
            Message("assistant", "", called),
            Message("tool", "No."),
        )
        return Conversation(id, messages, tools=tools)

    deduplicator = Deduplicator("passthrough")
    for id, city, tools in (
        ("s:0", "Rome", "[]"),
        ("s:1", "Oslo", "[]"),
        ("s:2", "Rome", '["other"]'),
    ):
        assert isinstance(deduplicator.check(calls(id, city, tools)), Conversation)
    assert deduplicator.check(calls("s:3", "Oslo", "[]")).detail == "The same as s:1."


def test_a_system_prompt_that_recurs_makes_no_two_prompts_similar():
    deduplicator = Deduplicator("replay", near="minhash")
    for number, text in enumerate(("Why is the sky blue?", "Who wrote the play?")):
        messages = Message("system", " ".join(WORDS)), Message("user", text)
        assert isinstance(deduplicator.check(Conversation(f"s:{number}", messages)), Conversation)


def test_scripts_without_spaces_are_compared_by_their_characters():
    deduplicator = Deduplicator("replay", near="minhash", similarity=0.6)
    said = "请告诉我明天在巴黎天气怎么样我要不要带一把雨伞出门"
    assert isinstance(deduplicator.check(asks(said, "a:0")), Conversation)
    assert isinstance(deduplicator.check(asks(said + "呢", "a:1")), RejectedRow)
    assert isinstance(
        deduplicator.check(asks("从前有一只猫它住在一座高高的山上每天都看月亮", "a:2")),
        Conversation,
    )


QUESTION = "Compose an engaging travel blog post about a recent trip to Hawaii"


@pytest.mark.parametrize(
    ("text", "held"),
    [
        (QUESTION, True),
        (f"Please: {QUESTION.upper()}?! Thanks.", True),
        (QUESTION.replace("Hawaii", "Rome"), False),
        (QUESTION.replace(" a recent", ",\n a  recent"), True),
        ("Why?", True),
        ("why", True),
        ("Why? Because.", False),  # a short question counts as a whole message alone
    ],
)
def test_a_conversation_that_holds_a_question_of_the_check_is_found_in_any_turn(text, held):
    check = CheckQuestions([asks(QUESTION, "bench:7"), asks("Why?", "bench:8")])
    for messages in ([Message("user", text)], [Message("user", "Hi."), Message("assistant", text)]):
        outcome = check.check(Conversation("s:0", tuple(messages)))
        assert isinstance(outcome, RejectedRow) == held
        assert not held or (outcome.reason is Reason.CONTAMINATED and "bench:" in outcome.detail)


@given(
    before=st.lists(st.sampled_from(WORDS[:9]), max_size=12),
    question=st.lists(st.sampled_from(WORDS[:9]), min_size=1, max_size=12),
    after=st.lists(st.sampled_from(WORDS[:9]), max_size=12),
    other=st.lists(st.sampled_from(WORDS[:9]), min_size=1, max_size=12),
)
def test_questions_are_found_where_a_search_for_their_words_finds_them(
    before, question, after, other
):
    def holds(words: list[str], wanted: list[str]) -> bool:
        within = any(words[at : at + len(wanted)] == wanted for at in range(len(words)))
        return words == wanted or (len(wanted) >= 8 and within)

    words = before + question + after
    check = CheckQuestions([asks(" ".join(question)), asks(" ".join(other))])
    expected = holds(words, question) or holds(words, other)
    assert (check.held_by(Message("user", ", ".join(words))) is not None) == expected


def readers(folder: Path, sizes: list[int], weights: list[float | None]) -> list[SourceReader]:
    made = []
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        path = folder / f"{number}.jsonl"
        path.write_text(
            "\n".join(
                json.dumps(f"{number}-{row}") if row % 5 else "{broken"
                for row in range(1, size + 1)
            )
        )
        made.append(SourceReader(SeedSource(path=path, weight=weight), f"s{number}", 1000))
    return made


def test_sources_are_mixed_in_proportion_to_their_weights_until_one_has_no_more(tmp_path):
    """Broken rows are passed on and do not count; the shares are right up to one conversation at
    every moment.
    """
    weights = [3.0, 1.0, 0.5]
    rows = list(mixed(readers(tmp_path, [400, 100, 400], weights)))
    names = [row.id.partition(":")[0] for row in rows if isinstance(row, Conversation)]
    for end in range(1, len(names) + 1):
        for number, weight in enumerate(weights):
            share = Fraction(weight) / Fraction(sum(weights)) * end
            assert abs(names[:end].count(f"s{number}") - share) < len(weights)
    assert (
        names.count("s1") == 80
        and 237 <= names.count("s0") <= 243
        and 38 <= names.count("s2") <= 42
    )
    assert any(isinstance(row, RejectedRow) for row in rows)
    ids = [row.id for row in rows]
    assert len(set(ids)) == len(ids)
    again = [row.id for row in mixed(readers(tmp_path, [400, 100, 400], weights))]
    assert again == ids


def test_of_equal_claims_the_first_named_source_is_next(tmp_path):
    rows = [row.id for row in mixed(readers(tmp_path, [3, 3], [1.0, 1.0]))]
    assert [row.partition(":")[0] for row in rows] == ["s0", "s1"] * 3


def test_without_weights_every_source_is_read_whole_in_order(tmp_path):
    rows = [row.id for row in mixed(readers(tmp_path, [7, 5], [None, None]))]
    assert rows == [*(f"s0:{n}" for n in range(7)), *(f"s1:{n}" for n in range(5))]
