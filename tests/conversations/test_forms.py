"""Every form of dump as the same conversation; repaired and rejected rows, with the reason."""

from __future__ import annotations

import copy
import datetime
import itertools
import json
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import SeedSource
from pipeline.config.data import Column
from pipeline.conversations.conversation import Conversation, Message, Reason, RejectedRow
from pipeline.conversations.forms import FORM_KEYS, KNOWN_KEYS, ROLES, RowSettings, read_row

DIALOGUE = (
    Message("user", "Hello?"),
    Message("assistant", "Hi."),
    Message("user", "你好"),
    Message("assistant", "Bye."),
)
MESSAGES = [{"role": message.role, "content": message.content} for message in DIALOGUE]
SAME_DIALOGUE = {
    "sharegpt": {
        "id": "x",
        "conversations": [
            {"from": role, "value": message.content}
            for role, message in zip(("human", "gpt", "user", "bard"), DIALOGUE, strict=True)
        ],
    },
    "ultrachat": {"id": "x", "data": ["Hello?", "Hi.", "你好", "Bye."]},
    "messages": {"id": "x", "messages": MESSAGES},
}


def read(row, form="auto", max_characters=10_000) -> Conversation | RejectedRow:
    return read_row(row, "seeds:0", RowSettings(form, max_characters))


def sharegpt(*turns):
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


def texts(row, form="auto") -> list[tuple[str, str]]:
    outcome = read(row, form)
    assert isinstance(outcome, Conversation), outcome
    return [(message.role, message.content) for message in outcome.messages]


@pytest.mark.parametrize("form", SAME_DIALOGUE)
def test_every_form_gives_the_same_conversation_detected_or_named(form):
    row = SAME_DIALOGUE[form]
    assert read(row) == read(row, form) == Conversation("seeds:0", DIALOGUE, "x", None)


def test_question_files_keep_their_questions_apart_and_their_category():
    row = {"question_id": 81, "category": "writing", "turns": ["First?", "Second?"]}
    questions = (Message("user", "First?"), Message("user", "Second?"))
    assert read(row) == Conversation("seeds:0", questions, "81", "writing")


ASK, ANSWER = "Translate.", "Bonjour."
ASKED, ANSWERED = ("user", ASK), ("assistant", ANSWER)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (ASK, [ASKED]),
        ({"prompt": ASK}, [ASKED]),
        ({"prompt": ASK, "response": ANSWER}, [ASKED, ANSWERED]),
        ({"prompt": ASK, "completion": ANSWER}, [ASKED, ANSWERED]),
        (
            {
                "prompt": [{"role": "user", "content": ASK}],
                "completion": [{"role": "assistant", "content": ANSWER}],
            },
            [ASKED, ANSWERED],
        ),
    ],
)
def test_a_prompt_is_a_question_with_its_answer_if_any(row, expected):
    assert texts(row) == texts(row, "prompts") == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"input": "Hello.", "output": ANSWER},
            [("user", "Translate.\n\nHello."), ANSWERED],
        ),
        ({"input": "", "output": ANSWER}, [ASKED, ANSWERED]),
        ({"input": None, "output": None}, [ASKED]),
        ({"output": ANSWER, "system": "Be kind."}, [("system", "Be kind."), ASKED, ANSWERED]),
        (
            {"history": [["Hi?", "Yes."]], "output": ANSWER},
            [("user", "Hi?"), ("assistant", "Yes."), ASKED, ANSWERED],
        ),
    ],
)
def test_alpaca_asks_the_instruction_with_its_input_after_earlier_turns(row, expected):
    row = {"instruction": ASK, **row}
    assert texts(row) == texts(row, "alpaca") == expected


@pytest.mark.parametrize("name", [name for name, role in ROLES.items() if role != "tool"])
def test_every_name_of_a_role_is_known(name):
    turns = [("system", "Be kind."), ("user", "Hello?"), ("assistant", '{"name": "f"}')]
    named = [(name.upper() if ROLES[name] == role else role, text) for role, text in turns]
    assert [role for role, _ in texts(sharegpt(*named))] == ["system", "user", "assistant"]


def test_ultrachat_with_prompt_and_messages_is_read_as_its_messages():
    for messages in (MESSAGES, MESSAGES[1:]):
        row = {"prompt": "Hello?", "prompt_id": "p1", "messages": messages}
        assert read(row) == read(row, "ultrachat") == Conversation("seeds:0", DIALOGUE, "p1")


PARTS = [
    [{"type": "text", "text": "Hello "}, "there?"],
    [{"type": "text", "value": "Hello "}, {"type": "input_text", "text": "there?"}],
    [{"type": "text", "text": {"value": "Hello there?", "annotations": []}}],
    [{"type": "text", "text": "Hello there?", "value": None}],
    [{"type": "text", "text": ""}, "Hello there?"],
]


@pytest.mark.parametrize("parts", PARTS)
def test_content_in_text_parts_is_joined_and_other_parts_are_rejected(parts):
    row = {"messages": [{"role": "user", "content": parts}]}
    assert texts(row) == [("user", "Hello there?")]
    parts = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    image = read({"messages": [{"role": "user", "content": parts}]})
    assert image.reason is Reason.NOT_TEXT and "image_url" in image.detail


@pytest.mark.parametrize(
    "row",
    [
        sharegpt(("system", "Be kind."), ("human", "Hello?")),
        {"system": "Be kind.", **sharegpt(("human", "Hello?"))},
        {"system_prompt": "Be kind.", "messages": [{"role": "user", "content": "Hello?"}]},
        {"system": "Be kind.", "turns": ["Hello?"]},
        {"system": "Be terse.", **sharegpt(("system", "Be kind."), ("human", "Hello?"))},
    ],
)
def test_system_prompts_are_kept_wherever_a_dump_has_them(row):
    assert texts(row) == [("system", "Be kind."), ("user", "Hello?")]


def test_null_columns_of_a_table_of_mixed_dumps_are_no_content():
    turn = {"from": None, "value": None, "role": "user", "content": "Hello?"}
    row = dict.fromkeys(("conversations", "data", "system", "id"))
    row |= {"messages": [turn], "prompt_id": 5}
    assert read(row) == Conversation("seeds:0", (Message("user", "Hello?"),), "5")


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
def test_a_clear_meaning_is_repaired(turns, repaired):
    assert [content for _, content in texts(sharegpt(*turns))] == repaired


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
        ({"instruction": ASK, "input": 7}, Reason.NOT_TEXT),
        ({"instruction": ASK, "output": ["b"]}, Reason.NOT_TEXT),
        ({"instruction": ASK, "history": [["a"]]}, Reason.UNKNOWN_FORMAT),
        (sharegpt(("narrator", "Once upon a time")), Reason.UNKNOWN_FORMAT),
        (sharegpt((None, "Hello?")), Reason.UNKNOWN_FORMAT),
        ({"conversations": "Hello?"}, Reason.UNKNOWN_FORMAT),
        ({"conversations": ["Hello?"]}, Reason.UNKNOWN_FORMAT),
        ({"text": "Once upon a time"}, Reason.UNKNOWN_FORMAT),
        ({}, Reason.UNKNOWN_FORMAT),
        (None, Reason.UNKNOWN_FORMAT),
        ([A, B], Reason.UNKNOWN_FORMAT),
    ],
)
def test_an_unclear_row_is_rejected_with_its_reason(row, reason):
    outcome = read(row)
    assert (outcome.id, outcome.reason) == ("seeds:0", reason) and outcome.detail
    assert outcome.row == json.loads(json.dumps(row))


def test_a_named_form_rejects_rows_of_another():
    outcome = read(SAME_DIALOGUE["ultrachat"], "sharegpt")
    assert outcome.reason is Reason.UNKNOWN_FORMAT and "`conversations`" in outcome.detail


def test_the_character_limit_is_exact():
    row = sharegpt(("human", "12345"), ("gpt", "67890"))
    assert isinstance(read(row, max_characters=10), Conversation)
    assert read(row, max_characters=9).reason is Reason.TOO_LONG


def calling(name="f", arguments="{}", result="7"):
    function = {"name": name, "arguments": arguments}
    call = {"role": "assistant", "tool_calls": [{"function": function}]}
    return {"messages": [MESSAGES[0], call, {"role": "tool", "content": result}]}


HOLDERS = {
    "a prompt": lambda text: text,
    "an answer": lambda text: sharegpt(A, ("gpt", text)),
    "a part of a text": lambda text: {"messages": [{"role": "user", "content": [text]}]},
    "a system prompt": lambda text: {"system": text, "prompt": "Hello?"},
    "an input": lambda text: {"instruction": "Hello?", "input": text},
    "a function's name": lambda text: calling(name=text),
    "a function's arguments": lambda text: calling(arguments=json.dumps({"x": text})),
    "a function's result": lambda text: calling(result=text),
    "an offered function": lambda text: {"prompt": "Hello?", "tools": [{"name": text}]},
    "an id": lambda text: {"id": text, "prompt": "Hello?"},
    "a category": lambda text: {"category": text, "prompt": "Hello?"},
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_half_a_surrogate_pair_is_undecodable_wherever_it_stands(holder):
    assert isinstance(read(HOLDERS[holder]("text")), Conversation)
    for text in ("a\ud83d", "\udc00b", "\ude00\ud83d", "\ufdd0"):
        assert read(HOLDERS[holder](text)).reason is Reason.UNDECODABLE


def test_a_rejected_row_shows_where_half_a_surrogate_pair_is():
    """An emoji is one character before it, and not two."""
    outcome = read({"prompt": "a😀b\ud83dc"})
    assert re.search(r"\b4\b", outcome.detail) and outcome.row == {"prompt": "a😀b\\ud83dc"}


def test_a_rejected_row_is_storable_whatever_a_data_set_holds():
    deep = []
    for _ in range(5000):
        deep = [deep]
    row = {"a\ud800": float("nan"), 3: datetime.date(2024, 1, 1), "deep": deep, "bytes": b"\xff"}
    line = json.dumps(read(row).row, ensure_ascii=False, allow_nan=False).encode()
    assert set(json.loads(line)) == {"a\\ud800", "3", "deep", "bytes"}


def test_the_configuration_names_what_the_forms_read():
    formats = get_args(SeedSource.model_fields["format"].annotation)
    assert set(formats) == {"auto", *FORM_KEYS}
    assert set(get_args(Column)) <= set(KNOWN_KEYS)


# Anything at all.

strings = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["", " ", "\ud800", "\0", "\ufeff", "\ufdd0", "Hello?"]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from([*ROLES, "stranger"]) | anything
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": strings}), max_size=2)
calls = st.lists(st.fixed_dictionaries({"name": strings, "arguments": anything}), max_size=2)
contents = strings | parts | anything
turns = st.fixed_dictionaries(
    {},
    optional={
        "from": roles,
        "value": contents,
        "role": roles,
        "content": contents,
        "tool_calls": calls | anything,
    },
)
rows = st.dictionaries(
    st.sampled_from(KNOWN_KEYS) | strings,
    st.lists(turns | strings, max_size=5) | anything,
    max_size=4,
)


@given(rows | anything, st.sampled_from(["auto", *FORM_KEYS]))
def test_any_row_has_exactly_one_outcome_and_it_can_be_stored(row, form):
    before = copy.deepcopy(row)
    outcome = read(row, form, 1000)
    assert str(row) == str(before), "a row is read, not changed"
    if isinstance(outcome, RejectedRow):
        stored = [outcome.detail, outcome.row]
        assert json.dumps(stored, ensure_ascii=False, allow_nan=False).encode()
        return
    roles = [message.role for message in outcome.messages]
    asked = roles[1:] if roles[0] == "system" else roles
    assert asked[0] == "user" and "system" not in asked
    if "assistant" in asked:
        assert all(one != other or one == "tool" for one, other in itertools.pairwise(asked))
    for message in outcome.messages:
        assert message.text and "\0" not in message.content
        assert message.text.encode()
    assert f"{outcome.source_id}{outcome.category}{outcome.tools}".encode()
