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


def read(row, form="auto") -> Conversation | RejectedRow:
    return read_row(row, "seeds:0", RowSettings(form))


def sharegpt(*turns):
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


def said(row, form="auto") -> str:
    """The conversation as one line."""
    outcome = read(row, form)
    assert isinstance(outcome, Conversation), outcome
    return " | ".join(f"{message.role}: {message.content}" for message in outcome.messages)


HELLO = "user: Hello? | assistant: Hi. | user: 你好 | assistant: Bye."
ASKED, ANSWERED = "user: Translate.", "user: Translate. | assistant: Bonjour."
KIND = "system: Be kind. | user: Hello?"


@pytest.mark.parametrize(
    ("form", "line", "expected"),
    [
        (
            "sharegpt",
            '{"conversations": [{"from": "HUMAN", "value": "Hello?"}, {"from": "gpt",'
            ' "value": "Hi."}, {"from": "user", "value": "你好"}, {"from": "bard",'
            ' "value": "Bye."}]}',
            HELLO,
        ),
        (
            "messages",
            '{"messages": [{"role": "user", "content": "Hello?"}, {"role": "assistant",'
            ' "content": "Hi."}, {"role": "user", "content": "你好"}, {"role": "assistant",'
            ' "content": "Bye."}]}',
            HELLO,
        ),
        ("ultrachat", '{"data": ["Hello?", "Hi.", "你好", "Bye."]}', HELLO),
        (
            "ultrachat",
            '{"prompt": "Hello?", "messages": [{"role": "user", "content": "Hello?"},'
            ' {"role": "assistant", "content": "Hi."}]}',
            "user: Hello? | assistant: Hi.",
        ),
        ("turns", '{"turns": ["First?", "Second?"]}', "user: First? | user: Second?"),
        ("alpaca", '{"instruction": "Translate.", "input": null, "output": null}', ASKED),
        (
            "alpaca",
            '{"instruction": "Translate.", "input": "Hello.", "output": "Bonjour."}',
            "user: Translate.\n\nHello. | assistant: Bonjour.",
        ),
        (
            "alpaca",
            '{"instruction": "How?", "history": [["Hi?", "Yes."]], "output": "So."}',
            "user: Hi? | assistant: Yes. | user: How? | assistant: So.",
        ),
        ("prompts", '"Translate."', ASKED),
        (
            "prompts",
            '{"prompt": [{"role": "user", "content": "Translate."}],'
            ' "completion": [{"role": "assistant", "content": "Bonjour."}]}',
            ANSWERED,
        ),
        (
            "messages",
            '{"messages": [{"role": "user", "content": "Hello?"}], "system_prompt": "Be kind."}',
            KIND,
        ),
        (
            "sharegpt",
            '{"system": "Be terse.", "conversations": [{"from": "system", "value": "Be kind."},'
            ' {"from": "human", "value": "Hello?"}]}',
            KIND,
        ),
        (
            "messages",
            '{"conversations": null, "data": null, "system": null, "messages": [{"from": null,'
            ' "value": null, "role": "user", "content": "Translate."}]}',
            ASKED,
        ),
    ],
)
def test_every_form_is_read_detected_or_named(form, line, expected):
    row = json.loads(line)
    assert said(row) == said(row, form) == expected


def test_ids_and_categories_are_the_dump_s_own():
    row = {"id": None, "question_id": 81, "category": "writing", "turns": ["First?"]}
    assert read(row) == Conversation("seeds:0", (Message("user", "First?"),), "81", "writing")


@pytest.mark.parametrize(
    "parts",
    [
        '[{"type": "text", "text": "Hello "}, "there?"]',
        '[{"type": "text", "text": ""}, {"type": "input_text", "text": "Hello there?"}]',
    ],
)
def test_text_parts_are_joined_and_other_parts_rejected(parts):
    turn = {"role": "user", "content": json.loads(parts)}
    assert said({"messages": [turn]}) == "user: Hello there?"
    turn["content"].append({"type": "image_url", "image_url": {"url": "x"}})
    image = read({"messages": [turn]})
    assert image.reason is Reason.NOT_TEXT and "image_url" in image.detail


TURN = re.compile(r"(\w+): ([^|]*)(?:\||$)")


@pytest.mark.parametrize(
    ("turns", "repaired"),
    [
        ("gpt: Welcome!|human: A?|gpt: B.", "user: A? | assistant: B."),
        ("system: Be kind.|gpt: Welcome!|human: A?", "system: Be kind. | user: A?"),
        ("system:  |human: A?|gpt: B.", "user: A? | assistant: B."),
        ("system: One.|system: Two.|human: A?", "system: One.\n\nTwo. | user: A?"),
        ("human: A?|gpt: B.|human: A?", "user: A? | assistant: B. | user: A?"),
        ("human: A?|gpt: B.|human: \n", "user: A? | assistant: B."),
        ("human: A?|human: A?|gpt: B.|gpt: B.", "user: A? | assistant: B."),
        ("human: A?|human: C?|gpt: B.", "user: A?\n\nC? | assistant: B."),
        ("human: \ufeff A?\0 \r\n|gpt: B.", "user:  A? | assistant: B."),
    ],
)
def test_a_clear_meaning_is_repaired(turns, repaired):
    assert said(sharegpt(*TURN.findall(turns))) == repaired


@pytest.mark.parametrize("question", ["instruction", "prompt"])
@pytest.mark.parametrize("answer", ["output", "response", "completion"])
def test_an_answer_is_read_under_each_of_its_names(question, answer):
    """Magpie has `instruction` and `response`."""
    assert said({question: "A?", answer: "B."}) == "user: A? | assistant: B."


@pytest.mark.parametrize("mark", ["weight", "train", "training", "trainable", "loss", "loss_mask"])
def test_a_turn_may_be_marked_not_to_learn(mark):
    """OpenAI, Axolotl, verl, ms-swift and slime each have such a key."""
    turns = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "B."}]
    for value, learned in ((0, False), (False, False), (1, True), (True, True), (None, True)):
        conversation = read({"messages": [turns[0], turns[1] | {mark: value}]})
        assert conversation.messages[1] == Message("assistant", "B.", learned=learned)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"conversations": []}', Reason.EMPTY),
        ('{"conversations": [{"from": "gpt", "value": "B."}]}', Reason.NO_USER_TURN),
        (
            '{"conversations": [{"from": "user", "value": "A?"}, {"from": "gpt", "value": "B."},'
            ' {"from": "gpt", "value": "C."}]}',
            Reason.WRONG_ORDER,
        ),
        (
            '{"conversations": [{"from": "user", "value": "A?"}, {"from": "system",'
            ' "value": "B."}]}',
            Reason.WRONG_ORDER,
        ),
        ('{"conversations": [{"from": "human", "value": 5}]}', Reason.NOT_TEXT),
        ('{"instruction": "A?", "history": [["a"]]}', Reason.UNKNOWN_FORMAT),
        ('{"conversations": [{"from": "narrator", "value": "Once"}]}', Reason.UNKNOWN_FORMAT),
        ('{"conversations": "A?"}', Reason.BROKEN_JSON),
        ('{"text": "Once upon a time"}', Reason.UNKNOWN_FORMAT),
        ('["A?"]', Reason.UNKNOWN_FORMAT),
        ('{"messages": [{"role": "user", "content": "A?"}]}', Reason.UNKNOWN_FORMAT),
    ],
)
def test_an_unclear_row_is_rejected_with_its_reason(line, reason):
    row = json.loads(line)
    outcome = read(row, "sharegpt" if "messages" in line else "auto")
    assert (outcome.id, outcome.reason, outcome.row) == ("seeds:0", reason, row) and outcome.detail


def test_the_character_limit_is_exact():
    row = {"data": ["1" * 100_000, "2" * 100_000]}
    assert isinstance(read(row), Conversation)
    row["data"][1] += "2"
    assert read(row).reason is Reason.TOO_LONG


@pytest.mark.parametrize(
    "line",
    [
        '"TEXT"',
        '{"data": ["A?"], "tools": [{"name": "TEXT"}]}',
        '{"messages": [{"role": "user", "content": "A?"}, {"role": "assistant", "tool_calls":'
        ' [{"name": "f", "arguments": "{\\"x\\": \\"TEXT\\"}"}]}]}',
        '{"id": "TEXT", "prompt": "A?", "tools": []}',
    ],
    ids=range(4),
)
def test_half_a_surrogate_pair_is_undecodable_wherever_it_stands(line):
    assert isinstance(read(json.loads(line)), Conversation)
    for text in ("a\ud83d", "\udc00b", "\ude00\ud83d"):
        outcome = read(json.loads(line.replace("TEXT", text)))
        assert outcome.reason is Reason.UNDECODABLE
        assert json.dumps(outcome.row, ensure_ascii=False).encode()


def test_a_rejected_row_is_storable_whatever_a_data_set_holds():
    deep = []
    for _ in range(5000):
        deep = [deep]
    row = {"a\ud800": float("nan"), 3: datetime.date(2024, 1, 1), "bytes": b"\xff"}
    assert read(row).row == {"a&#55296;": "NaN", "3": "a date", "bytes": "a bytes"}
    assert read({"deep": deep}).row == "…"


def test_the_configuration_names_what_the_forms_read():
    formats = get_args(SeedSource.model_fields["format"].annotation)
    assert set(formats) == {"auto", *FORM_KEYS}
    assert set(get_args(Column)) <= set(KNOWN_KEYS)


# Anything at all.

strings = st.text(st.characters(), max_size=6) | st.sampled_from(
    ["", " ", "\ud800", "\0", "\ufeff", "Hello?"]
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from([*ROLES, "stranger"]) | anything
texts = strings | st.lists(st.fixed_dictionaries({"text": strings}), max_size=2) | anything
calls = st.lists(st.fixed_dictionaries({"name": strings, "arguments": anything}), max_size=2)
fields = {"from": roles, "role": roles, "value": texts, "content": texts, "tool_calls": calls}
turns = st.lists(st.fixed_dictionaries({}, optional=fields) | strings, max_size=5)
rows = st.dictionaries(st.sampled_from(KNOWN_KEYS) | strings, turns | anything, max_size=4)


@given(rows | anything, st.sampled_from(["auto", *FORM_KEYS]))
def test_any_row_has_one_outcome_that_can_be_stored(row, form):
    before = copy.deepcopy(row)
    outcome = read(row, form)
    assert str(row) == str(before), "a row is read, not changed"
    if isinstance(outcome, RejectedRow):
        stored = [outcome.detail, outcome.row]
        assert json.dumps(stored, ensure_ascii=False, allow_nan=False).encode()
        return
    asked = [message.role for message in outcome.messages]
    if asked[0] == "system":
        asked.pop(0)
    assert asked[0] == "user" and "system" not in asked
    if "assistant" in asked:
        assert all(one != other or one == "tool" for one, other in itertools.pairwise(asked))
    for message in outcome.messages:
        assert message.text.encode() and "\0" not in message.content
    assert f"{outcome.source_id}{outcome.category}{outcome.tools}".encode()
