"""The bundled seeds are ours, varied, well-formed, and can be composed again to the last byte."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import yaml

from pipeline.config import SeedsConfig
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.duplicates import plain
from pipeline.conversations.sources import source_readers

DATA = Path(__file__).parents[2] / "data"
SHAREGPT, ULTRACHAT = DATA / "seeds.sharegpt.jsonl", DATA / "seeds.ultrachat.jsonl"
TOPICS = sorted((DATA / "topics").glob("*.yaml"))
PARTS = ("opening", "more", "closing")
HAN = re.compile(r"[一-鿿]")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def conversations() -> list[list[str]]:
    """User and assistant texts in turn, read without the pipeline's own readers."""
    found = [row["data"] for row in rows(ULTRACHAT)]
    for row in rows(SHAREGPT):
        turns = row["conversations"]
        found.append([turn["value"] for turn in turns if turn["from"] != "system"])
    return found


@pytest.fixture(scope="module")
def composer():
    spec = importlib.util.spec_from_file_location("compose_seeds", DATA / "compose.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_composer_writes_the_bundled_files_byte_for_byte(composer):
    composed = composer.compose()
    assert sorted(composed) == sorted(path.name for path in DATA.glob("seeds.*.jsonl"))
    for name, content in composed.items():
        assert content.encode() == (DATA / name).read_bytes(), (
            f"{name} is stale: run python data/compose.py"
        )


@pytest.mark.parametrize("path", [SHAREGPT, ULTRACHAT], ids=["sharegpt", "ultrachat"])
def test_each_form_has_hundreds_of_rows_in_a_megabyte(path):
    ids = [row["id"] for row in rows(path)]
    assert len(set(ids)) == len(ids) >= 200
    assert path.stat().st_size < 1_000_000


def test_a_share_of_sharegpt_rows_has_a_system_prompt():
    first = [row["conversations"][0]["from"] for row in rows(SHAREGPT)]
    assert 0.2 < first.count("system") / len(first) < 0.6


def test_conversations_have_two_to_five_turns(conversations):
    lengths = Counter(len(each) for each in conversations)
    assert set(lengths) == {4, 6, 8, 10}
    assert min(lengths.values()) > 0.05 * len(conversations)


def test_no_two_questions_or_answers_begin_alike(conversations):
    questions = {plain(each[0]) for each in conversations}
    assert len(questions) == len(conversations)
    beginnings = []
    for each in conversations:
        for answer in each[1::2]:
            beginnings.append(tuple(pieces(answer)[: 24 if HAN.search(answer) else 20]))
    assert len(set(beginnings)) == len(beginnings)


def pieces(text: str) -> list[str]:
    return list(text) if HAN.search(text) else text.split()


def test_a_tenth_of_the_seeds_is_entirely_chinese(conversations):
    chinese = [[HAN.search(text) is not None for text in each] for each in conversations]
    assert 0.08 <= sum(map(all, chinese)) / len(conversations) <= 0.2
    assert all(any(each) == all(each) for each in chinese)


def test_every_text_is_a_text_without_open_slots(conversations):
    for text in itertools.chain.from_iterable(conversations):
        prose = re.sub(r"```.*?```|`[^`]*`", "code", text, flags=re.DOTALL)
        assert not re.search(r"[{}]|None|  |\.\.| [,.?!]", prose), text
        assert text == text.strip() and not text[0].islower(), text


def test_answers_are_long_and_repeat_nothing(conversations):
    answers = [answer for each in conversations for answer in each[1::2]]
    words = sorted(len(answer.split()) for answer in answers if not HAN.search(answer))
    assert words[len(words) // 20] >= 25 and words[-1] <= 150
    for answer in answers:
        found = pieces(answer)
        ngrams = list(zip(*(found[start:] for start in range(4)), strict=False))
        assert len(set(ngrams)) > 0.75 * len(ngrams), answer


@pytest.mark.parametrize("path", TOPICS, ids=lambda path: path.stem)
def test_every_subject_has_every_value_and_every_value_is_used(path):
    topic = yaml.CSafeLoader(path.read_text("utf-8")).get_single_data()
    sums = topic.get("sums", {})
    text = json.dumps([topic[part] for part in PARTS])
    used = {*re.findall(r"\{([a-z_]+)", text), *itertools.chain(*sums.values())}
    keys = set(topic["subjects"][0])
    for subject in topic["subjects"]:  # a stray comma makes a key of its own
        assert set(subject) == keys and None not in subject.values(), subject
    assert {*keys, *topic.get("words", {}), *sums} <= used


@pytest.mark.parametrize("name", [path.stem for path in TOPICS])
def test_an_answer_repeats_only_words_that_were_asked(composer, name):
    topic = composer.read_topics()[name]

    def words_in(text: str) -> set[str]:
        """The kinds of words in a text, also those within a subject's values and sums."""
        kinds = set()
        for slot in re.findall(r"\{([a-z_]+)", text):
            if slot in topic["words"]:
                kinds.add(slot)
            elif slot in topic.get("sums", {}):
                operands = [side for side in topic["sums"][slot] if isinstance(side, str)]
                kinds |= words_in("".join(f"{{{operand}" for operand in operands))
            else:
                kinds |= words_in(str(topic["subjects"][0][slot]))
        return kinds

    openings = [ask for exchange in topic["opening"] for ask in exchange["ask"]]
    always_asked = set.intersection(*map(words_in, openings))
    for part in PARTS:
        for exchange in topic[part]:
            for ask in exchange["ask"]:
                known = words_in(ask)
                if part != "opening":
                    known |= always_asked
                assert words_in(exchange["say"]) <= known, ask


def test_all_rows_of_each_form_s_example_are_read():
    folder = DATA / "forms"
    (reader,) = source_readers(SeedsConfig.model_validate({"sources": [{"path": folder}]}))
    found = list(reader)
    assert all(isinstance(each, Conversation) for each in found), found
    assert {count.name for count in reader.read} == {path.name for path in folder.iterdir()}
    assert {count.rows for count in reader.read} == {2, 3} and len(found) == 13
    assert sum(any(message.uses_tools for message in each.messages) for each in found) == 2
