"""The bundled seeds are ours, varied, well-formed, and can be composed again to the last byte."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from pipeline.config import SeedsConfig
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.duplicates import normalize_text
from pipeline.conversations.sources import source_readers
from tests.flows.tiny import read_lines

DATA = Path(__file__).parents[2] / "data"
SHAREGPT, ULTRACHAT = DATA / "seeds.sharegpt.jsonl", DATA / "seeds.ultrachat.jsonl"
HAN = re.compile(r"[一-鿿]")


@pytest.fixture(scope="module")
def conversations() -> list[list[str]]:
    """User and assistant texts in turn, read without the pipeline's own readers."""
    found = [row["data"] for row in read_lines(ULTRACHAT)]
    for row in read_lines(SHAREGPT):
        turns = row["conversations"]
        found.append([turn["value"] for turn in turns if turn["from"] != "system"])
    return found


def test_the_composer_writes_the_bundled_files_byte_for_byte():
    """Run `python data/compose.py` where a file is stale."""
    composed = runpy.run_path(str(DATA / "compose.py"))["compose"]()
    bundled = {path.name: path.read_bytes() for path in DATA.glob("seeds.*.jsonl")}
    assert {name: text.encode() for name, text in composed.items()} == bundled


def test_no_two_questions_or_answers_begin_alike(conversations):
    questions = {normalize_text(each[0]) for each in conversations}
    assert len(questions) == len(conversations)
    beginnings = []
    for each in conversations:
        for answer in each[1::2]:
            beginnings.append(tuple(pieces(answer)[: 24 if HAN.search(answer) else 20]))
    assert len(set(beginnings)) == len(beginnings)


def pieces(text: str) -> list[str]:
    return list(text) if HAN.search(text) else text.split()


def test_all_rows_of_each_form_s_example_are_read():
    folder = DATA / "forms"
    (reader,) = source_readers(SeedsConfig.model_validate({"sources": [{"path": folder}]}))
    found = list(reader)
    assert [type(each) for each in found] == [Conversation] * 13
    assert {count.name for count in reader.read} == {path.name for path in folder.iterdir()}
    assert sum(any(message.uses_tools for message in each.messages) for each in found) == 2
