"""Every seed is kept once or quarantined, and its first question alone decides its split."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.conversations.conversation import Conversation, Message, Reason, RejectedRow
from pipeline.conversations.duplicates import CheckQuestions
from pipeline.conversations.splits import batch_into_shards, split_rows
from pipeline.errors import DataError
from pipeline.report.report import Report, StageFigures
from pipeline.report.warnings import report_warnings
from pipeline.storage.shards import ShardWriter
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import latest, quarantined, run_again, save_seeds, stored

SMALL_SET = "pipeline.conversations.splits.SMALL_SET"


def conversation(name: str, question: str | None = None) -> Conversation:
    return Conversation(name, (Message("user", question or name),))


def splits(rows, holdout: float) -> dict[str, str]:
    pairs = list(split_rows(rows, holdout))
    return {row.id: split for row, split in pairs if isinstance(row, Conversation)}


def place(name: str) -> float:
    """The place in [0, 1) of a question of letters, digits and colons, calculated anew."""
    normalised = name.lower().replace(":", " ")
    return int(hashlib.sha256(f"split:{normalised}".encode()).hexdigest()[:16], 16) / 16**16


@given(number=st.integers(24, 900), holdout=st.floats(0.001, 0.6))
def test_a_small_set_holds_out_exactly_what_is_asked(number, holdout):
    """At least eight rows each, or a twentieth up to 32."""
    counts = Counter(splits([conversation(f"s:{i}") for i in range(number)], holdout).values())
    each = min(max(8, min(32, number // 20), round(number * holdout / 2)), number // 2)
    assert counts["calibrate"] == counts["check"] == each
    assert counts["train"] == number - 2 * each


@given(bad=st.sets(st.integers(0, 79)), seed=st.randoms(use_true_random=False))
def test_splits_ignore_the_order_and_refused_rows(bad, seed):
    rows = [conversation(f"s:{i}") for i in range(80)]
    mixed = [*rows, *(RejectedRow(f"bad:{i}", Reason.EMPTY, "", None) for i in bad)]
    seed.shuffle(mixed)
    assert splits(mixed, 0.2) == splits(rows, 0.2)


OPENINGS = st.lists(
    st.sampled_from(["hi", "Hi!", "HI", "hello", "who?", "why", *"abcdefghijklmnop"]), max_size=120
)


@given(openings=OPENINGS, holdout=st.floats(0.001, 0.99), limit=st.sampled_from([64, 4096]))
def test_no_question_opens_conversations_of_two_splits(openings, holdout, limit):
    """Three questions are enough for every split of a small set to have a row."""
    rows = [conversation(f"s:{i}", question) for i, question in enumerate(openings)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SMALL_SET, limit)
        found = splits(rows, holdout)
    of_question: dict[str, set[str]] = {}
    for row, question in zip(rows, openings, strict=True):
        of_question.setdefault(question.lower().strip("!?"), set()).add(found[row.id])
    assert all(len(each) == 1 for each in of_question.values())
    if len(of_question) >= 3 and limit == 4096 and holdout <= 0.5:
        assert set(found.values()) == {"train", "calibrate", "check"}


@given(number=st.integers(64, 300), holdout=st.floats(0.01, 0.9))
def test_in_a_large_set_each_row_s_own_hash_decides(number, holdout):
    """A large set is streamed; one up to the limit is counted."""
    taken = []

    def rows():
        for i in range(number):
            taken.append(i)
            yield conversation(f"s:{i}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SMALL_SET, 64)
        next(split_rows(rows(), holdout))
        assert len(taken) == min(number, 65)
        found = splits(rows(), holdout)
    if number == 64:
        assert Counter(found.values())["check"] == min(max(8, round(32 * holdout)), 32)
        return
    for name, split in found.items():
        expected = "train"
        if place(name) <= holdout:
            expected = "calibrate" if place(name) <= holdout / 2 else "check"
        assert split == expected


@given(number=st.integers(0, 6000))
def test_shards_are_sized_by_the_number_of_rows(number):
    """An eighth of the rows, 16 at least and 512 at most; the last shard is what is left."""
    found = list(batch_into_shards(iter(range(number)), "auto"))
    assert [row for shard in found for row in shard] == list(range(number)), "all rows, in order"
    wanted = 512 if number > 4096 else max(16, math.ceil(number / 8))
    assert {len(shard) for shard in found[:-1]} <= {wanted}
    assert all(0 < len(shard) <= wanted for shard in found)
    sizes = [min(100, number - first) for first in range(0, number, 100)]
    assert [len(shard) for shard in batch_into_shards(range(number), 100)] == sizes


@pytest.fixture
def made(make_config, tmp_path):
    """`made(path, **settings)`: the finished seeds stage of a file or directory."""

    def make(path, **settings) -> StageDirectory:
        config = make_config(tmp_path, seeds__sources=[{"path": str(path)}], **settings)
        return latest(run_again(config, until="seeds"), "seeds")

    return make


def lines(rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def talks(path, rows: list[list[str]]):
    """A file of conversations whose turns alternate."""
    path.write_text(lines({"data": row} for row in rows))
    return path


def test_openings_that_are_too_frequent_give_a_warning(made, tmp_path):
    openings = ["hi"] * 30 + [f"q{i}" for i in range(10)]
    rows = [[question, "Yes.", f"And number {i}?"] for i, question in enumerate(openings)]
    stage = made(talks(tmp_path / "seeds.jsonl", rows))
    counts = Counter(row["split"] for row in stored(stage))
    assert counts == {"train": 30, "calibrate": 5, "check": 5}
    (warning,) = stage.summary["warnings"]
    assert "the same question" in warning and "train 30, calibrate 5, check 5" in warning
    assert '"hi"' not in warning  # reports have no text of the data
    assert warning in report_warnings(Report(seeds=StageFigures(warnings=[warning])))
    alike = [["Hi there", "Yes.", f"And number {i}?"] for i in range(40)]
    with pytest.raises(DataError, match=r"the same question.*train 40"):
        made(talks(tmp_path / "alike.jsonl", alike))


def test_text_that_is_not_read_gives_a_warning(made, tmp_path):
    rows = [{"prompt": f"{n}?", "context": "The wall is long. " * 9} for n in range(40)]
    path = tmp_path / "seeds.jsonl"
    path.write_text(lines(rows))
    (warning,) = made(path).summary["warnings"]
    assert "`context` has text in 40 of 40 rows" in warning and 'input: "context"}' in warning


def test_every_row_of_a_dirty_file_is_accounted_for(made, tmp_path):
    """Half a surrogate pair is quarantined in valid UTF-8."""
    path = save_seeds(tmp_path / "seeds.jsonl")
    turns = [("human", "Moon?"), ("function_call", '{"name": "moon"}'), ("observation", "7")]
    calls = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    bad = [{"conversations": []}, {"what": 1}, {"prompt": "why \ud83d?"}]
    path.write_text('{"broken\n' + lines([*bad, calls]) + path.read_text())
    stage = made(path)
    refused = quarantined(stage)
    assert [row["id"] for row in refused] == [f"seeds:{i}" for i in range(4)]
    assert {row["id"] for row in stored(stage)} == {f"seeds:{i}" for i in range(4, 45)}
    assert refused[3]["reason"] == "undecodable" and "&#55357;" in refused[3]["row"]["prompt"]
    assert json.dumps(refused, ensure_ascii=False).encode()
    assert stage.summary["tool_rows"] == 1
    counts = [stage.summary[f"{split}_rows"] for split in ("train", "calibrate", "check")]
    assert sum(counts) == 41


def test_too_few_rows_for_three_splits_are_refused(made, tmp_path):
    assert made(save_seeds(tmp_path / "enough.jsonl", 24)).summary["train_rows"] == 8
    with pytest.raises(DataError, match=r"23 conversations are too few.*seeds\.sources"):
        made(save_seeds(tmp_path / "few.jsonl", 23))


def test_fewer_seeds_than_before_leave_no_stray_shard(made, tiny_seeds):
    """A Hub data set may lose rows under the same name."""
    stage = made(tiny_seeds)
    kept, stray = stored(stage), stage.shard_path(4)
    with ShardWriter(stage.task(4), SEEDS) as writer:
        writer.write(kept[:1])
        writer.commit("seeds", [kept[0]["id"]], {})
    (stage.path / "DONE.json").unlink()
    assert stored(made(tiny_seeds)) == kept and not stray.exists()


@pytest.mark.parametrize(
    ("settings", "kept_of_each"),
    [
        ({"mode": "replay"}, 2),  # two second questions
        ({"mode": "replay", "rounds": 1}, 1),
        ({"mode": "self-talk"}, 1),
        ({"mode": "passthrough"}, 6),
    ],
)
def test_rows_of_which_generation_reads_the_same_are_one(made, tmp_path, settings, kept_of_each):
    """40 first questions, each with three answers before each of two second questions."""
    rows = []
    for q, a, n in itertools.product(range(40), range(3), "ab"):
        rows.append([f"Question {q}?", f"Answer {a}.", f"And then {n}?"])
    changes = {f"generate__{key}": value for key, value in settings.items()}
    summary = made(talks(tmp_path / "seeds.jsonl", rows), **changes).summary
    assert summary["rows"] == 40 * kept_of_each
    assert summary["reasons"].get("duplicate", 0) == 240 - 40 * kept_of_each


def test_rows_with_a_question_of_the_check_are_skipped(made, tmp_path, monkeypatch):
    """A file that finds no others changes nothing."""
    path, questions = save_seeds(tmp_path / "seeds.jsonl"), tmp_path / "bench.jsonl"
    asked = "Compose an engaging travel blog post about Hawaii"
    path.write_text(path.read_text() + lines([{"prompt": f"Please {asked.lower()}, now."}]))

    def against(*turns: str, **settings) -> StageDirectory:
        questions.write_text(lines([{"question_id": 81, "turns": turns}]))
        return made(path, **{"check__prompts": str(questions)} | settings)

    clean = against(asked, "And shorter?")
    assert clean.summary["rows"] == 40 and clean.summary["reasons"] == {"contaminated": 1}
    (refused,) = quarantined(clean)
    assert refused["id"] == "seeds:40" and "bench:0" in refused["detail"]
    with monkeypatch.context() as patch:
        patch.setattr(CheckQuestions, "check", None)  # what a file finds is found once
        assert against(asked, "And shorter?").path == clean.path
    assert against("And longer?", asked).path == clean.path
    whole = against("Something else altogether")
    assert whole.summary["rows"] == 41 and whole.path != clean.path
    assert against(asked, seeds__decontaminate=False).path == whole.path
    assert against(check__prompts=8).path == whole.path
