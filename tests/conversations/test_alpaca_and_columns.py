"""Alpaca's form, answers beside prompts, content in parts, and columns of other names in every kind
of file.
"""

from __future__ import annotations

import json
from typing import get_args

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from pipeline.config import SeedSource
from pipeline.config.data import Column
from pipeline.conversations.conversation import Conversation, Message, Reason, RejectedRow
from pipeline.conversations.forms import FORM_KEYS, KNOWN_KEYS, RowSettings, read_row
from pipeline.conversations.sources import SourceReader
from pipeline.errors import ConfigError, DataError


def read(row, **settings) -> Conversation | RejectedRow:
    return read_row(row, "s:0", RowSettings(**settings))


def texts(row, **settings) -> list[tuple[str, str]]:
    outcome = read(row, **settings)
    assert isinstance(outcome, Conversation), outcome
    return [(message.role, message.content) for message in outcome.messages]


ASK, ANSWER = "Translate.", "Bonjour."


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"input": "Hello.", "output": ANSWER},
            [("user", "Translate.\n\nHello."), ("assistant", ANSWER)],
        ),
        ({"input": "", "output": ANSWER}, [("user", ASK), ("assistant", ANSWER)]),
        ({"input": None, "output": None}, [("user", ASK)]),
        ({}, [("user", ASK)]),
        (
            {"output": ANSWER, "system": "Be kind."},
            [("system", "Be kind."), ("user", ASK), ("assistant", ANSWER)],
        ),
        (
            {"history": [["Hi?", "Yes."]], "output": ANSWER},
            [("user", "Hi?"), ("assistant", "Yes."), ("user", ASK), ("assistant", ANSWER)],
        ),
    ],
)
def test_alpaca_asks_the_instruction_with_its_input_after_earlier_turns(row, expected):
    assert (
        texts({"instruction": ASK, **row})
        == texts({"instruction": ASK, **row}, form="alpaca")
        == expected
    )


@pytest.mark.parametrize(
    "odd", [{"input": 7}, {"history": "x"}, {"history": [["a"]]}, {"output": ["b"]}]
)
def test_an_alpaca_row_of_other_types_is_refused(odd):
    assert read({"instruction": ASK, **odd}).reason in (Reason.NOT_TEXT, Reason.UNKNOWN_FORMAT)


def test_answers_beside_prompts_are_the_seed_s_answers_be_they_texts_or_turns():
    for row in (
        {"prompt": ASK, "response": ANSWER},
        {"prompt": ASK, "completion": ANSWER},
        {
            "prompt": [{"role": "user", "content": ASK}],
            "completion": [{"role": "assistant", "content": ANSWER}],
        },
    ):
        assert texts(row) == [("user", ASK), ("assistant", ANSWER)]


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": "Hello "}, "there?"],
        [{"type": "text", "value": "Hello "}, {"type": "input_text", "text": "there?"}],
        [{"type": "text", "text": {"value": "Hello there?", "annotations": []}}],
        [{"type": "text", "text": "Hello there?", "value": None}],
    ],
)
def test_content_in_parts_is_joined_in_each_spelling(parts):
    assert texts({"messages": [{"role": "user", "content": parts}]}) == [("user", "Hello there?")]


ROWS = [{"q": f"问题 {n}?", "a": "So.", "number": n, "prompt": "not this one"} for n in range(5)]
COLUMNS = {"prompt": "q", "response": "a", "id": "number"}
WRITERS = {
    "a.jsonl": lambda path: path.write_text("\n".join(map(json.dumps, ROWS))),
    "a.json": lambda path: path.write_text(json.dumps(ROWS)),
    "a.csv": lambda path: path.write_text(
        "q,a,number,prompt\n" + "".join(f"问题 {n}?,So.,{n},x\n" for n in range(5))
    ),
    "a.tsv": lambda path: path.write_text(
        "q\ta\tnumber\n" + "".join(f"问题 {n}?\tSo.\t{n}\n" for n in range(5))
    ),
    "a.parquet": lambda path: pq.write_table(pa.Table.from_pylist(ROWS), path),
    "a.arrow": lambda path: feather.write_feather(pa.Table.from_pylist(ROWS), path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_columns_of_other_names_are_read_from_every_kind_of_file(name, tmp_path):
    WRITERS[name](tmp_path / name)
    source = SeedSource(path=tmp_path / name, columns=COLUMNS)
    rows = list(SourceReader(source, "s", 1000))
    said = (Message("user", "问题 3?"), Message("assistant", "So."))
    assert len(rows) == 5 and rows[3] == Conversation("s:3", said, "3")


@pytest.mark.parametrize("name", WRITERS)
def test_a_column_that_is_not_there_is_named_with_those_that_are(name, tmp_path):
    WRITERS[name](tmp_path / name)
    source = SeedSource(path=tmp_path / name, columns={"prompt": "question"})
    error = (
        DataError if ".json" in name else ConfigError
    )  # rows of JSON may differ, a table's columns may not
    with pytest.raises(error, match=r"`question`.*`q`, `a`, `number`"):
        list(SourceReader(source, "s", 1000))


def test_a_data_set_of_the_hub_has_columns_too(tmp_path):
    WRITERS["a.parquet"](tmp_path / "train.parquet")
    hub = {"hub": str(tmp_path), "split": "train"}
    assert len(list(SourceReader(SeedSource(**hub, columns=COLUMNS), "s", 1000))) == 5
    with pytest.raises(ConfigError, match=r"`question`.*`q`, `a`"):
        list(SourceReader(SeedSource(**hub, columns={"prompt": "question"}), "s", 1000))


def test_what_the_configuration_names_is_what_the_forms_read():
    assert {*get_args(SeedSource.model_fields["format"].annotation)} == {"auto", *FORM_KEYS}
    assert set(get_args(Column)) <= set(KNOWN_KEYS)
