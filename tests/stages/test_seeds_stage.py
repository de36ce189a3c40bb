"""Every seed is kept once or quarantined, and its first question alone decides its split."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from io import StringIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from pipeline.artifacts.seed_rows import SEEDS
from pipeline.cli.app import app
from pipeline.conversations.conversation import Conversation, Message, Reason, RejectedRow
from pipeline.conversations.duplicates import CheckQuestions, plain
from pipeline.conversations.splits import Openings, in_shards, split_rows
from pipeline.errors import CheckFailed, ConfigError, DataError
from pipeline.flow import run_flow
from pipeline.report.facts import warnings
from pipeline.report.report import Report, StageFigures
from pipeline.report.tables import skipped_files_table
from pipeline.run.reporting import assemble
from pipeline.stages.seeds import require_enough
from pipeline.storage.shards import ShardWriter, read_rows
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import save_seeds


def conversation(name: str, question: str | None = None) -> Conversation:
    return Conversation(name, (Message("user", question or name),))


def refused(name: str) -> RejectedRow:
    return RejectedRow(name, Reason.EMPTY, "", None)


def splits(rows, holdout: float) -> dict[str, str]:
    pairs = list(split_rows(rows, holdout))
    return {row.id: split for row, split in pairs if isinstance(row, Conversation)}


def place(name: str) -> float:
    """The place in [0, 1) of a question of letters, digits and colons, calculated anew."""
    normalised = name.lower().replace(":", " ")
    return int(hashlib.sha256(f"split:{normalised}".encode()).hexdigest()[:16], 16) / 16**16


@given(number=st.integers(24, 400), holdout=st.floats(0.001, 0.6))
def test_a_small_set_holds_out_at_least_eight_rows_each_and_exactly_the_fraction_asked_for(
    number, holdout
):
    counts = Counter(splits([conversation(f"s:{i}") for i in range(number)], holdout).values())
    each = min(max(8, round(number * holdout / 2)), number // 2)
    assert (counts["calibrate"], counts["check"], counts["train"]) == (
        each,
        each,
        number - 2 * each,
    )


@given(
    number=st.integers(0, 80),
    bad=st.sets(st.integers(0, 79)),
    seed=st.randoms(use_true_random=False),
)
def test_splits_ignore_the_order_and_refused_rows(number, bad, seed):
    rows = [conversation(f"s:{i}") for i in range(number)]
    expected = splits(rows, 0.2)
    mixed = [*rows, *(refused(f"bad:{i}") for i in bad)]
    seed.shuffle(mixed)
    assert splits(mixed, 0.2) == expected


OPENINGS = st.lists(
    st.sampled_from(["hi", "Hi!", "HI", "hello", "who?", "why", *"abcdefghijklmnop"]), max_size=120
)


@given(openings=OPENINGS, holdout=st.floats(0.001, 0.99), limit=st.sampled_from([64, 4096]))
def test_no_question_opens_conversations_of_two_splits(openings, holdout, limit):
    rows = [conversation(f"s:{i}", question) for i, question in enumerate(openings)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.conversations.splits.SMALL_SET", limit)
        found = splits(rows, holdout)
    of_question: dict[str, set[str]] = {}
    for row, question in zip(rows, openings, strict=True):
        of_question.setdefault(question.lower().strip("!?"), set()).add(found[row.id])
    assert all(len(each) == 1 for each in of_question.values())


@given(openings=OPENINGS, holdout=st.floats(0.001, 0.5))
def test_three_questions_are_enough_for_every_split_to_have_a_row(openings, holdout):
    found = splits(
        [conversation(f"s:{i}", question) for i, question in enumerate(openings)], holdout
    )
    num_questions = len({question.lower().strip("!?") for question in openings})
    assert num_questions < 3 or set(found.values()) == {"train", "calibrate", "check"}


def test_a_question_of_a_fifth_of_all_rows_leaves_the_counts_exact():
    rows = [conversation(f"s:{i}", "hi" if i % 5 == 0 else None) for i in range(400)]
    counts = Counter(splits(rows, 0.1).values())
    assert counts == {"train": 360, "calibrate": 20, "check": 20}


@given(number=st.integers(65, 300), holdout=st.floats(0.01, 0.9))
def test_in_a_large_set_each_row_s_own_hash_decides(number, holdout):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.conversations.splits.SMALL_SET", 64)
        found = splits([conversation(f"s:{i}") for i in range(number)], holdout)
    for name, split in found.items():
        expected = (
            "calibrate"
            if place(name) <= holdout / 2
            else "check"
            if place(name) <= holdout
            else "train"
        )
        assert split == expected


@given(number=st.integers(0, 6000))
def test_shards_are_sized_by_what_is_there(number):
    """An eighth of the rows, 16 at least and 512 at most; the last shard is what is left."""
    found = list(in_shards(iter(range(number)), "auto"))
    assert [row for shard in found for row in shard] == list(range(number)), "all rows, in order"
    wanted = 512 if number > 4096 else max(16, math.ceil(number / 8))
    assert {len(shard) for shard in found[:-1]} <= {wanted} and all(
        0 < len(shard) <= wanted for shard in found
    )
    assert len(found) <= 8 or number > 4096
    assert [len(shard) for shard in in_shards(range(number), 100)] == [
        min(100, number - first) for first in range(0, number, 100)
    ]


def save_openings(path, openings: list[str]):
    """A file of conversations with these first questions; the second one tells them apart."""
    rows = [[question, "Yes.", f"And number {i}?"] for i, question in enumerate(openings)]
    path.write_text("".join(json.dumps({"data": row}) + "\n" for row in rows))
    return path


def test_questions_that_are_too_frequent_are_named_and_the_run_goes_on(make_config, tmp_path):
    path = save_openings(tmp_path / "seeds.jsonl", ["hi"] * 30 + [f"q{i}" for i in range(10)])
    stage, kept, _ = run_seeds(make_config(tmp_path, seeds__sources=[{"path": str(path)}]))
    assert Counter(row["split"] for row in kept) == {"train": 30, "calibrate": 5, "check": 5}
    (warning,) = stage.summary["warnings"]
    assert '"hi" opens 30 of 40' in warning
    assert warning in warnings(Report(seeds=StageFigures(warnings=[warning])))


def test_conversations_that_all_open_alike_are_refused(make_config, tmp_path):
    path = save_openings(tmp_path / "seeds.jsonl", ["Hi there"] * 40)
    with pytest.raises(DataError, match='"Hi there" opens 40 of 40'):
        run_seeds(make_config(tmp_path, seeds__sources=[{"path": str(path)}]))


def test_verify_names_a_question_that_opens_two_splits(make_config, tmp_path):
    config = make_config(tmp_path)
    stage, _, _ = run_seeds(config)
    assert CliRunner().invoke(app, ["verify", str(config.run.directory)]).exit_code == 0
    path = stage.shard_path(0)
    table = pq.read_table(path)
    other = ["check" if split == "train" else "train" for split in table["split"].to_pylist()]
    doubled = table.set_column(table.schema.get_field_index("split"), "split", pa.array(other))
    both = pa.concat_tables([table, doubled])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageDirectory, "verify", lambda self: [])
        pq.write_table(both, path)
        result = CliRunner().invoke(app, ["verify", str(config.run.directory)])
    assert isinstance(result.exception, CheckFailed)
    assert plain(table["messages"][0].as_py()[0]["content"]) in str(result.exception)


def test_a_large_set_is_streamed(monkeypatch):
    monkeypatch.setattr("pipeline.conversations.splits.SMALL_SET", 64)
    taken = []

    def rows():
        for i in range(1000):
            taken.append(i)
            yield conversation(f"s:{i}")

    next(split_rows(rows(), 0.1))
    assert len(taken) == 65


def test_a_set_as_large_as_the_limit_is_still_counted_out(monkeypatch):
    monkeypatch.setattr("pipeline.conversations.splits.SMALL_SET", 64)
    counts = Counter(splits([conversation(f"s:{i}") for i in range(64)], 0.01).values())
    assert counts == {"train": 48, "calibrate": 8, "check": 8}


def run_seeds(config):
    run = run_flow(config, until="seeds", executor="inline", console=Console(quiet=True))
    stage = run.latest("seeds")
    kept = [row for path in stage.shards() for row in read_rows(path)]
    files = sorted((stage.path / "quarantine").iterdir())
    return (
        stage,
        kept,
        [json.loads(line) for file in files for line in file.read_text().splitlines()],
    )


def test_duplicates_across_sources_are_quarantined_and_name_the_first(make_config, tmp_path):
    one, other = save_seeds(tmp_path / "a.jsonl"), save_seeds(tmp_path / "b.jsonl", 45)
    sources = [{"path": str(one)}, {"path": str(other)}]
    stage, kept, quarantined = run_seeds(make_config(tmp_path, seeds__sources=sources))
    assert [row["id"] for row in kept] == [f"a:{i}" for i in range(40)] + [
        f"b:{i}" for i in range(40, 45)
    ]
    assert [row["id"] for row in quarantined] == [f"b:{i}" for i in range(40)]
    assert {row["reason"] for row in quarantined} == {"duplicate"}
    assert all(f"a:{i}" in row["detail"] for i, row in enumerate(quarantined))
    assert stage.summary["rows"] == 45 and stage.summary["reasons"] == {"duplicate": 40}


def test_every_row_of_a_dirty_file_is_accounted_for(make_config, tmp_path):
    path = save_seeds(tmp_path / "seeds.jsonl")
    dirty = [
        '{"broken',
        '{"conversations": []}',
        '{"what": 1}',
        json.dumps({"conversations": [{"from": "gpt"}]}),
    ]
    path.write_text("\n".join([*dirty, path.read_text()]))
    stage, kept, quarantined = run_seeds(
        make_config(tmp_path, seeds__sources=[{"path": str(path)}])
    )
    assert {row["id"] for row in quarantined} == {f"seeds:{i}" for i in range(4)}
    assert {row["id"] for row in kept} == {f"seeds:{i}" for i in range(4, 44)}
    assert sum(stage.summary[f"{split}_rows"] for split in ("train", "calibrate", "check")) == len(
        kept
    )


def test_half_a_surrogate_pair_is_quarantined_in_valid_utf8(make_config, tmp_path):
    path = save_seeds(tmp_path / "seeds.jsonl")
    path.write_text(path.read_text() + json.dumps({"prompt": "why \ud83d?"}) + "\n")
    stage, kept, quarantined = run_seeds(
        make_config(tmp_path, seeds__sources=[{"path": str(path)}])
    )
    assert [(row["id"], row["reason"]) for row in quarantined] == [("seeds:40", "undecodable")]
    assert (
        json.dumps(quarantined, ensure_ascii=False).encode()
        and "\\ud83d" in quarantined[0]["row"]["prompt"]
    )
    assert len(kept) == 40 and stage.summary["reasons"] == {"undecodable": 1}


@pytest.mark.parametrize(("number", "enough"), [(23, False), (24, True)])
def test_too_few_rows_for_three_splits_are_refused(make_config, tmp_path, number, enough):
    config = make_config(
        tmp_path, seeds__sources=[{"path": str(save_seeds(tmp_path / "few.jsonl", number))}]
    )
    if enough:
        _, kept, _ = run_seeds(config)
        assert Counter(row["split"] for row in kept) == {"train": 8, "calibrate": 8, "check": 8}
    else:
        with pytest.raises(
            DataError, match=r"23 usable conversations are too few.*seeds\.sources\)?\.$"
        ):
            run_seeds(config)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"train": 4, "calibrate": 18, "check": 18}, r"or lower seeds\.holdout"),
        ({"train": 26, "calibrate": 9, "check": 5}, r"or raise seeds\.holdout"),
        ({"train": 7, "calibrate": 8, "check": 8}, r"seeds\.sources\.$"),
    ],
)
def test_the_advice_on_the_held_out_share_points_to_the_split_that_has_too_few(rows, says):
    summary = {"rows": sum(rows.values())} | {
        f"{split}_rows": number for split, number in rows.items()
    }
    openings = Openings()
    openings.add(conversation("s:0"))
    with pytest.raises(DataError, match=says):
        require_enough(summary, "seeds", 0.1, openings)


def test_fewer_seeds_than_before_leave_no_stray_shard(make_config, tmp_path):
    """A Hub data set may lose rows under the same name; a file's content is part of the
    fingerprint.
    """
    config = make_config(tmp_path)
    stage, kept, _ = run_seeds(config)
    stray = stage.shard_path(4)
    where = {"index": 4, "fingerprint": stage.fingerprint}
    with ShardWriter(stray, stage.quarantine_path(4), SEEDS, **where) as writer:
        writer.write(kept[:1])
        writer.commit("seeds", [kept[0]["id"]], {})
    (stage.path / "DONE.json").unlink()
    assert run_seeds(config)[1] == kept and not stray.exists()


@pytest.mark.parametrize(
    ("generate", "kept_of_each"),
    [
        ({"mode": "replay"}, 2),  # two second questions
        ({"mode": "replay", "rounds": 1}, 1),
        ({"mode": "self-talk"}, 1),
        ({"mode": "passthrough"}, 6),
    ],
)
def test_rows_of_which_generation_reads_the_same_are_one_and_so_none_is_in_two_splits(
    make_config, tmp_path, generate, kept_of_each
):
    """40 first questions, each with three answers before each of two second questions."""
    path = tmp_path / "seeds.jsonl"
    rows = [
        [f"Question {q}?", f"Answer {a}.", f"And then {n}?"]
        for q in range(40)
        for n in "ab"
        for a in range(3)
    ]
    path.write_text("".join(json.dumps({"data": row}) + "\n" for row in rows))
    changes = {f"generate__{key}": value for key, value in generate.items()}
    stage, kept, _ = run_seeds(
        make_config(tmp_path, seeds__sources=[{"path": str(path)}], **changes)
    )
    assert len(kept) == 40 * kept_of_each and stage.summary["quarantined"] == 240 - len(kept)
    assert set(stage.summary["reasons"]) <= {"duplicate"}

    def read(row: dict) -> tuple[str, ...]:
        texts = [message["content"] for message in row["messages"]]
        return tuple(
            {"replay": texts[::2], "self-talk": texts[:1], "passthrough": texts}[generate["mode"]]
        )

    trained = {read(row) for row in kept if row["split"] == "train"}
    assert not [row["id"] for row in kept if row["split"] != "train" and read(row) in trained]


def test_prompts_that_are_nearly_the_same_are_kept_unless_that_is_not_wanted(make_config, tmp_path):
    path = save_seeds(tmp_path / "seeds.jsonl")
    near = [
        "What is C, and  why?",
        "what is C and why",
        "WHAT IS C — AND WHY?!",
        "what is B and why",
        "怎么样？",
        "怎么样",
        "?",
        "!",
    ]
    with path.open("a") as file:
        file.write("".join(json.dumps({"prompt": text}) + "\n" for text in near))
    sources = {"seeds__sources": [{"path": str(path)}]}
    assert len(run_seeds(make_config(tmp_path, **sources))[1]) == 48
    kept = run_seeds(make_config(tmp_path, **sources, seeds__near_duplicates="quarantine"))[1]
    assert [row["messages"][0]["content"] for row in kept[40:]] == [
        near[i] for i in (0, 3, 4, 6, 7)
    ]


def test_what_a_directory_holds_is_said_by_name_in_the_terminal_the_record_and_the_report(
    make_config, tmp_path
):
    folder = tmp_path / "mine"
    folder.mkdir()
    save_seeds(folder / "a.jsonl", 30)
    save_seeds(folder / "b.NDJSON", 35)
    (folder / "README.txt").write_text("Call me Ishmael.")
    (folder / "[red]x\x1b[2J.csv").write_text("name\nleft-pad\n")
    said = StringIO()
    config = make_config(tmp_path, seeds__sources=[{"path": str(folder)}])
    run = run_flow(config, until="seeds", executor="inline", console=Console(file=said, width=400))
    (source,) = run.latest("seeds").summary["sources"]
    assert source["source"] == "mine"
    assert [(file["name"], file["rows"]) for file in source["read"]] == [
        ("a.jsonl", 30),
        ("b.NDJSON", 35),
    ]
    assert [file["name"] for file in source["skipped"]] == ["README.txt", "[red]x\x1b[2J.csv"]
    assert (
        "seeds: read b.NDJSON: 35 rows" in said.getvalue()
        and "seeds: skipped README.txt: " in said.getvalue()
    )
    assert "skipped [red]x" in said.getvalue() and "\x1b" not in said.getvalue()
    table = skipped_files_table(assemble(run, config))
    assert [row[0] for row in table.rows] == [
        "README.txt",
        "[red]x\x1b[2J.csv",
    ] and "2 files" in table.note


def test_rows_that_hold_a_question_of_the_check_are_left_out_and_a_file_that_finds_no_others_changes_nothing(  # noqa: E501
    make_config, tmp_path, monkeypatch
):
    """Where the rows are on the Hub, only the run reads them: the file itself is part of what the
    seeds are.
    """
    path, questions = save_seeds(tmp_path / "seeds.jsonl"), tmp_path / "bench.jsonl"
    asked = "Compose an engaging travel blog post about Hawaii"
    with path.open("a") as file:
        file.write(json.dumps({"prompt": f"Please {asked.lower()}, now."}) + "\n")

    def made(*turns: str, **settings):
        questions.write_text(json.dumps({"question_id": 81, "turns": turns}) + "\n")
        sources = {"seeds__sources": [{"path": str(path)}], "check__prompts": str(questions)}
        return run_seeds(make_config(tmp_path, **sources | settings))

    clean, kept, quarantined = made(asked, "And shorter?")
    assert len(kept) == 40 and clean.summary["reasons"] == {"contaminated": 1}
    assert quarantined[0]["id"] == "seeds:40" and "bench:0" in quarantined[0]["detail"]
    monkeypatch.setattr(CheckQuestions, "check", None)  # what a file finds is found once
    assert made(asked, "And shorter?")[0].path == clean.path
    monkeypatch.undo()
    assert made("And longer?", asked)[0].path == clean.path
    whole, kept, _ = made("Something else altogether")
    assert len(kept) == 41 and whole.path != clean.path
    assert made(asked, seeds__decontaminate=False)[0].path == whole.path
    assert made(check__prompts=8)[0].path == whole.path

    monkeypatch.setattr(
        "pipeline.conversations.sources.hub_rows", lambda *_: map(json.loads, path.open())
    )
    on_hub = {"seeds__sources": [{"hub": "someone/chats"}]}
    one, other = (
        made(turn, **on_hub)[0].path for turn in ("Something else altogether", "Whatever else")
    )
    assert one != other == made("Whatever else", **on_hub)[0].path


def test_a_mixture_is_part_of_the_record_and_weights_stand_with_all_sources_or_with_none(
    make_config, tmp_path
):
    one, other = save_seeds(tmp_path / "a.jsonl", 60), tmp_path / "b.jsonl"
    other.write_text("".join(json.dumps(f"Question {n}?") + "\n" for n in range(60)))
    sources = [{"path": str(one), "weight": 2}, {"path": str(other), "weight": 1}]
    stage, kept, _ = run_seeds(make_config(tmp_path, seeds__sources=sources))
    assert Counter(row["id"][0] for row in kept) == {"a": 60, "b": 30}
    assert [source["weight"] for source in stage.summary["sources"]] == [2, 1]
    del sources[1]["weight"]
    with pytest.raises(ConfigError, match="give every source a weight, or none"):
        make_config(tmp_path, seeds__sources=sources)
