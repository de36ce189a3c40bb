"""Every form of dump as the same conversation; what is repaired, and what is refused with which
reason.
"""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.conversations.conversation import Conversation, Message, Reason, RejectedRow
from pipeline.conversations.duplicates import Deduplicator
from pipeline.conversations.forms import (
    CALLING_ROLES,
    FORM_KEYS,
    KNOWN_KEYS,
    ROLES,
    RowSettings,
    read_row,
)

DIALOGUE = (
    Message("user", "Hello?"),
    Message("assistant", "Hi."),
    Message("user", "你好"),
    Message("assistant", "Bye."),
)
QUESTIONS = (Message("user", "First?"), Message("user", "Second?"))

SHAREGPT_ROLES = ("human", "gpt", "user", "bard")
SAME_DIALOGUE = {
    "sharegpt": {
        "id": "x",
        "conversations": [
            {"from": r, "value": m.content} for r, m in zip(SHAREGPT_ROLES, DIALOGUE, strict=True)
        ],
    },
    "ultrachat": {"id": "x", "data": ["Hello?", "Hi.", "你好", "Bye."]},
    "messages": {"id": "x", "messages": [{"role": m.role, "content": m.content} for m in DIALOGUE]},
}
SAME_QUESTIONS = {
    "turns": {
        "question_id": 81,
        "category": "writing",
        "turns": ["First?", "Second?"],
        "reference": ["-"],
    }
}


def read(row, form="auto", max_characters=10_000):
    return read_row(row, "seeds:0", RowSettings(form, max_characters))


def sharegpt(*turns):
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


def contents(outcome):
    assert isinstance(outcome, Conversation), outcome
    return [(message.role, message.content) for message in outcome.messages]


@pytest.mark.parametrize("form", SAME_DIALOGUE)
def test_every_form_gives_the_same_conversation_detected_or_named(form):
    row = SAME_DIALOGUE[form]
    assert read(row) == read(row, form) == Conversation("seeds:0", DIALOGUE, "x", None)


def test_question_files_keep_their_questions_apart_and_their_category():
    assert read(SAME_QUESTIONS["turns"]) == Conversation("seeds:0", QUESTIONS, "81", "writing")


@pytest.mark.parametrize("row", ["Why?", {"prompt": "Why?"}])
def test_a_plain_prompt_is_a_conversation_of_one_question(row):
    assert read(row) == read(row, "prompts") == Conversation("seeds:0", (Message("user", "Why?"),))


@pytest.mark.parametrize("name", [name.upper() for name in ROLES if name not in CALLING_ROLES])
def test_every_name_of_a_role_is_known(name):
    first = "human" if ROLES[name.lower()] != "user" else name
    turns = [(name, "Be kind.")] if ROLES[name.lower()] == "system" else []
    row = sharegpt(
        *turns, (first, "Hello?"), (name if ROLES[name.lower()] == "assistant" else "gpt", "Hi.")
    )
    assert contents(read(row))[-2:] == [("user", "Hello?"), ("assistant", "Hi.")]


def test_ultrachat_with_prompt_and_messages_is_read_as_its_messages():
    row = {"prompt": "Hello?", "prompt_id": "p1", "messages": SAME_DIALOGUE["messages"]["messages"]}
    assert read(row) == read(row, "ultrachat") == Conversation("seeds:0", DIALOGUE, "p1")
    without_first = row | {"messages": row["messages"][1:]}
    assert read(without_first).messages == DIALOGUE


def test_content_in_text_parts_is_joined_and_any_other_part_is_not_text():
    def parts(*parts):
        return {"messages": [{"role": "user", "content": list(parts)}]}

    assert contents(read(parts({"type": "text", "text": "Hello"}, " there?"))) == [
        ("user", "Hello there?")
    ]
    image = read(
        parts({"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "x"}})
    )
    assert (image.reason, "image_url" in image.detail) == (Reason.NOT_TEXT, True)


@pytest.mark.parametrize(
    "row",
    [
        sharegpt(("system", "Be kind."), ("human", "Hello?")),
        {"system": "Be kind.", **sharegpt(("human", "Hello?"))},
        {"system_prompt": "Be kind.", "messages": [{"role": "user", "content": "Hello?"}]},
        {"system": "Be kind.", "turns": ["Hello?"]},
    ],
)
def test_system_prompts_are_kept_wherever_a_dump_has_them(row):
    assert contents(read(row)) == [("system", "Be kind."), ("user", "Hello?")]


def test_a_system_prompt_among_the_turns_goes_before_the_one_beside_them():
    row = {"system": "Be terse.", **sharegpt(("system", "Be kind."), ("human", "Hello?"))}
    assert contents(read(row)) == [("system", "Be kind."), ("user", "Hello?")]


def test_null_columns_of_a_table_of_mixed_dumps_are_no_content():
    turn = {"from": None, "value": None, "role": "user", "content": "Hello?"}
    row = {
        "conversations": None,
        "data": None,
        "messages": [turn],
        "system": None,
        "id": None,
        "prompt_id": 5,
    }
    assert read(row) == Conversation("seeds:0", (Message("user", "Hello?"),), "5")


# Mended: the meaning is plain.

A, B = ("human", "Hello?"), ("gpt", "Hi.")


@pytest.mark.parametrize(
    ("turns", "repaired"),
    [
        ([("gpt", "Welcome!"), A, B], ["Hello?", "Hi."]),
        ([("system", "Be kind."), ("gpt", "Welcome!"), A], ["Be kind.", "Hello?"]),
        ([("system", " "), A, B], ["Hello?", "Hi."]),
        ([("system", "One."), ("system", "Two."), A], ["One.\n\nTwo.", "Hello?"]),
        ([A, B, A], ["Hello?", "Hi.", "Hello?"]),
        ([A, B, ("human", "\n")], ["Hello?", "Hi."]),
        ([A, ("gpt", ""), ("human", "")], ["Hello?"]),
        ([A, A, B, B], ["Hello?", "Hi."]),
        ([A, ("human", "Are you there?"), B], ["Hello?\n\nAre you there?", "Hi."]),
        ([("human", "\ufeff Hello?\0 \r\n"), B], [" Hello?", "Hi."]),
        ([("human", "&lt;b&gt; is bold?"), B], ["&lt;b&gt; is bold?", "Hi."]),
    ],
)
def test_what_is_plainly_meant_is_mended(turns, repaired):
    assert [content for _, content in contents(read(sharegpt(*turns)))] == repaired


# RejectedRow: the meaning is not plain.


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (sharegpt(), Reason.EMPTY),
        (sharegpt(("human", "  "), ("gpt", "")), Reason.EMPTY),
        (sharegpt(A, ("gpt", ""), A, B), Reason.EMPTY),
        ("", Reason.EMPTY),
        (sharegpt(B), Reason.NO_USER_TURN),
        (sharegpt(("system", "Be kind.")), Reason.NO_USER_TURN),
        (sharegpt(A, B, ("gpt", "Something else.")), Reason.WRONG_ORDER),
        (sharegpt(A, ("system", "Be kind."), B), Reason.WRONG_ORDER),
        (sharegpt(("human", 5)), Reason.NOT_TEXT),
        (sharegpt(("human", None)), Reason.NOT_TEXT),
        ({"prompt": 5}, Reason.NOT_TEXT),
        ({"data": ["Hello?", ["Hi."]]}, Reason.NOT_TEXT),
        (sharegpt(("narrator", "Once upon a time")), Reason.UNKNOWN_FORMAT),
        (sharegpt((None, "Hello?")), Reason.UNKNOWN_FORMAT),
        ({"conversations": "Hello?"}, Reason.UNKNOWN_FORMAT),
        ({"conversations": ["Hello?"]}, Reason.UNKNOWN_FORMAT),
        ({"text": "Once upon a time"}, Reason.UNKNOWN_FORMAT),
        ({}, Reason.UNKNOWN_FORMAT),
        (None, Reason.UNKNOWN_FORMAT),
        (5, Reason.UNKNOWN_FORMAT),
        ([A, B], Reason.UNKNOWN_FORMAT),
    ],
)
def test_what_is_not_plain_is_refused_with_its_reason_and_row(row, reason):
    outcome = read(row)
    assert isinstance(outcome, RejectedRow)
    assert (outcome.id, outcome.reason, outcome.row) == (
        "seeds:0",
        reason,
        json.loads(json.dumps(row)),
    )
    assert outcome.detail


def calling(**changes):
    function = {"name": "f", "arguments": "{}"} | changes
    call = {"role": "assistant", "tool_calls": [{"function": function}]}
    return {
        "messages": [{"role": "user", "content": "Hello?"}, call, {"role": "tool", "content": "7"}]
    }


HOLDERS = {
    "a prompt": lambda text: text,
    "a question": lambda text: sharegpt(("human", text), B),
    "an answer": lambda text: sharegpt(A, ("gpt", text)),
    "a part of a text": lambda text: {
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]
    },
    "a system prompt": lambda text: {"system": text, "prompt": "Hello?"},
    "an input": lambda text: {"instruction": "Hello?", "input": text},
    "a function's name": lambda text: calling(name=text),
    "a function's arguments": lambda text: calling(arguments=json.dumps({"x": text})),
    "a function's result": lambda text: {
        "messages": [*calling()["messages"][:2], {"role": "tool", "content": text}]
    },
    "an offered function": lambda text: {
        "prompt": "Hello?",
        "tools": [{"name": "f", "description": text}],
    },
    "an id": lambda text: {"id": text, "prompt": "Hello?"},
    "a category": lambda text: {"category": text, "prompt": "Hello?"},
}


@pytest.mark.parametrize("text", ["a\ud83d", "\udc00b", "\ude00\ud83d", "\ufdd0"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_half_a_surrogate_pair_is_undecodable_wherever_it_stands(holder, text):
    assert isinstance(read(HOLDERS[holder]("text")), Conversation)
    outcome = read(HOLDERS[holder](text))
    assert isinstance(outcome, RejectedRow) and outcome.reason is Reason.UNDECODABLE


def test_the_detail_names_the_character_that_is_half_a_pair():
    """An emoji is one character before it, and not two."""
    assert re.search(r"\b4\b", read("a😀b\ud83dc").detail)


def test_a_quarantined_row_shows_half_a_surrogate_pair_as_its_escape():
    outcome = read({"prompt": "why \ud83d?"})
    assert outcome.row == {"prompt": "why \\ud83d?"}


def test_a_named_form_refuses_rows_of_another():
    outcome = read(SAME_DIALOGUE["ultrachat"], "sharegpt")
    assert (outcome.reason, "`conversations`" in outcome.detail) == (Reason.UNKNOWN_FORMAT, True)


def test_the_character_limit_is_exact():
    row = sharegpt(("human", "12345"), ("gpt", "67890"))
    assert isinstance(read(row, max_characters=10), Conversation)
    assert read(row, max_characters=9).reason is Reason.TOO_LONG


def test_a_refused_row_is_storable_whatever_a_data_set_holds():
    deep = []
    for _ in range(5000):
        deep = [deep]
    row = {
        "a\ud800": float("nan"),
        3: datetime.date(2024, 1, 1),
        "deep": deep,
        "bytes": b"\xff",
        "big": 10**30,
    }
    line = json.dumps(read(row).row, ensure_ascii=False, allow_nan=False).encode()
    assert set(json.loads(line)) == {"a\\ud800", "3", "deep", "bytes", "big"}


def test_a_conversation_is_refused_the_second_time_across_sources_and_the_first_is_named():
    deduplicator = Deduplicator("passthrough")
    first, other = Conversation("a:0", DIALOGUE, "x"), Conversation("a:1", QUESTIONS)
    again = Conversation("b:0", DIALOGUE, "y", "writing")
    assert [deduplicator.check(first), deduplicator.check(other)] == [first, other]
    refused = deduplicator.check(again)
    assert (refused.id, refused.reason, "a:0" in refused.detail) == ("b:0", Reason.DUPLICATE, True)


def test_the_same_texts_in_other_roles_are_no_duplicate():
    deduplicator = Deduplicator("passthrough")
    one = Conversation("a:0", (Message("user", "A"), Message("assistant", "B")))
    two = Conversation("a:1", (Message("user", "A"), Message("user", "B")))
    assert deduplicator.check(one) is one
    assert deduplicator.check(two) is two


# Anything at all.

texts = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["", " ", "\ud800", "\0", "\ufeff", "\ufdd0", "Hello?"]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
turns = st.fixed_dictionaries(
    {},
    optional={
        "from": st.sampled_from([*ROLES, "stranger"]) | anything,
        "value": texts | anything,
        "role": st.sampled_from([*ROLES, "stranger"]) | anything,
        "content": texts
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": texts}), max_size=2)
        | anything,
        "tool_calls": anything
        | st.lists(st.fixed_dictionaries({"name": texts, "arguments": anything}), max_size=2),
    },
)
mutated = st.dictionaries(
    st.sampled_from(KNOWN_KEYS) | texts,
    st.lists(turns | texts, max_size=5) | anything,
    max_size=4,
)


@given(mutated | anything, st.sampled_from(["auto", *FORM_KEYS]))
def test_any_row_has_exactly_one_outcome_and_it_can_be_stored(row, form):
    before = copy.deepcopy(row)
    outcome = read_row(row, "seeds:0", RowSettings(form, 1000))
    assert str(row) == str(before), "a row is read, not changed"
    if isinstance(outcome, RejectedRow):
        assert outcome.detail.encode()
        assert json.dumps(outcome.row, ensure_ascii=False, allow_nan=False).encode()
        return
    roles = [message.role for message in outcome.messages]
    assert "user" in roles and "system" not in roles[1:]
    asked = roles[1:] if roles[0] == "system" else roles
    assert asked[0] == "user"
    assert "assistant" not in asked or all(
        one != other or one == "tool" for one, other in itertools.pairwise(asked)
    )
    assert all(message.content or message.tool_calls for message in outcome.messages)
    assert not any("\0" in message.content for message in outcome.messages)
    stored = [message.content for message in outcome.messages] + [
        outcome.source_id or "",
        outcome.category or "",
    ]
    assert "".join(stored).encode()
