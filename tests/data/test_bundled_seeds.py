"""The bundled seeds are ours, varied, well-formed, and can be composed again to the last byte."""

from __future__ import annotations

import importlib.util
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
HAN = re.compile(r"[一-鿿]")


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def turns(row: dict) -> list[str]:
    """The row's user and assistant texts in order, read without the pipeline's own readers."""
    if "data" in row:
        return row["data"]
    return [message["value"] for message in row["conversations"] if message["from"] != "system"]


@pytest.fixture(scope="module")
def conversations() -> list[list[str]]:
    return [turns(row) for path in (SHAREGPT, ULTRACHAT) for row in rows(path)]


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


def test_each_form_has_hundreds_of_conversations_in_less_than_a_megabyte():
    for path in (SHAREGPT, ULTRACHAT):
        assert len(rows(path)) >= 200
        assert path.stat().st_size < 1_000_000


def test_sharegpt_rows_alternate_human_and_gpt_after_at_most_one_system_prompt():
    speakers = [[message["from"] for message in row["conversations"]] for row in rows(SHAREGPT)]
    assert 0.2 < sum(each[0] == "system" for each in speakers) / len(speakers) < 0.6
    for each in speakers:
        spoken = each[1:] if each[0] == "system" else each
        assert spoken == ["human", "gpt"] * (len(spoken) // 2)


def test_ultrachat_rows_are_lists_of_texts_that_end_with_an_answer():
    for row in rows(ULTRACHAT):
        assert row["data"] and len(row["data"]) % 2 == 0
        assert all(isinstance(text, str) for text in row["data"])


def test_conversations_have_two_to_five_turns_and_all_lengths_occur(conversations):
    lengths = Counter(len(each) // 2 for each in conversations)
    assert set(lengths) == {2, 3, 4, 5}
    assert min(lengths.values()) > 0.05 * len(conversations)


def test_ids_are_unique_and_no_conversation_appears_twice(conversations):
    ids = [row["id"] for path in (SHAREGPT, ULTRACHAT) for row in rows(path)]
    assert len(set(ids)) == len(ids)
    assert len({tuple(each) for each in conversations}) == len(conversations)


def test_no_two_conversations_open_with_the_same_question(conversations):
    questions = [plain(each[0]) for each in conversations]
    assert len(set(questions)) == len(questions)


def test_no_two_answers_begin_with_the_same_words(conversations):
    beginnings = []
    for answer in (answer for each in conversations for answer in each[1::2]):
        pieces = list(answer)[:24] if HAN.search(answer) else answer.split()[:20]
        beginnings.append(tuple(pieces))
    assert len(set(beginnings)) == len(beginnings)


def test_a_tenth_or_more_is_chinese_and_the_rest_has_no_chinese_character(conversations):
    share = sum(all(HAN.search(text) for text in each) for each in conversations) / len(
        conversations
    )
    mixed = [
        each
        for each in conversations
        if 0 < sum(bool(HAN.search(text)) for text in each) < len(each)
    ]
    assert 0.08 <= share <= 0.2
    assert not mixed


def test_no_slot_is_left_open_and_every_text_reads_as_a_text(conversations):
    for text in (text for each in conversations for text in each):
        prose = re.sub(r"```.*?```|`[^`]*`", "code", text, flags=re.DOTALL)
        assert not re.search(r"[{}]|None|  |\.\.| [,.?!]", prose), text
        assert text == text.strip() and not text[0].islower(), text


def test_answers_are_long_enough_to_measure_decoding_on(conversations):
    words = sorted(
        len(text.split()) for each in conversations for text in each[1::2] if not HAN.search(text)
    )
    assert words[len(words) // 20] >= 25
    assert words[-1] <= 150


def test_no_answer_repeats_itself(conversations):
    for text in (text for each in conversations for text in each[1::2]):
        pieces = list(text) if HAN.search(text) else text.split()
        grams = list(zip(*(pieces[start:] for start in range(4)), strict=False))
        assert len(set(grams)) > 0.75 * len(grams), text


@pytest.mark.parametrize("path", TOPICS, ids=lambda path: path.stem)
def test_every_subject_of_a_topic_has_every_value_and_every_value_is_used(path):
    topic = yaml.CSafeLoader(path.read_text("utf-8")).get_single_data()
    keys = set(topic["subjects"][0])
    asked = set(
        re.findall(
            r"\{([a-z_]+)", json.dumps([topic[part] for part in ("opening", "more", "closing")])
        )
    )
    summed = {
        side
        for operands in topic.get("sums", {}).values()
        for side in operands
        if isinstance(side, str)
    }
    for subject in topic["subjects"]:
        assert set(subject) == keys and None not in subject.values(), (
            subject
        )  # a stray comma makes a key of its own
    assert keys | set(topic.get("words", {})) | set(topic.get("sums", {})) <= asked | summed


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
    for part in ("opening", "more", "closing"):
        for exchange in topic[part]:
            for ask in exchange["ask"]:
                known = words_in(ask)
                if part != "opening":
                    known |= always_asked
                assert words_in(exchange["say"]) <= known, ask


def test_sums_are_right(composer):
    slots = composer.choose_slots(
        {"words": {"count": [4]}, "sums": {"total": ["count", "*", 3], "rest": [20, "-", "total"]}},
        {"item": "cups"},
        composer.random.Random(0),
    )
    assert slots == {"item": "cups", "count": 4, "total": 12, "rest": 8}


def test_slots_render_in_every_form(composer):
    slots = {"dish": "fried rice", "needs": ["rice", "peas", "salt"], "count": 3}
    assert composer.fill("{dish^}: {needs,}.", slots) == "Fried rice: rice, peas and salt."
    assert composer.fill("{needs#}", slots) == "1. rice\n2. peas\n3. salt"
    assert composer.fill("{needs*}", slots) == "- rice\n- peas\n- salt"
    assert composer.fill("{count} {needs、} {needs2} {}", slots) == "3 rice、peas、salt peas {}"
    with pytest.raises(KeyError):
        composer.fill("{drink}", slots)


def test_the_example_of_each_form_is_read_to_its_last_row():
    folder = DATA / "forms"
    (reader,) = source_readers(SeedsConfig.model_validate({"sources": [{"path": folder}]}))
    found = list(reader)
    assert all(isinstance(each, Conversation) for each in found), found
    rows_of = {count.name: count.rows for count in reader.read}
    assert rows_of.keys() == {path.name for path in folder.iterdir()} and not reader.skipped
    assert sum(rows_of.values()) == len(found) == 13 and set(rows_of.values()) == {2, 3}
    asked = {each.messages[0].content for each in found}
    assert {"What is 7 times 8?", "Is there a boat after five?", "Count to four."} <= asked
    assert sum(any(message.role == "tool" for message in each.messages) for each in found) == 2
