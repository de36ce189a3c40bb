"""`inspect` shows a row as a person reads it."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.artifacts.generated_rows import TokenRow
from pipeline.cli.inspect import COLOURS, coloured
from pipeline.formatting import visible
from pipeline.storage.shards import read_rows
from pipeline.targets.spec import TargetSpec, load_tokenizer
from tests.cli.tables import one_paragraph
from tests.flows.tiny import run_again, stored


def test_inspect_shows_a_row_as_it_was_said(command, finished_run):
    row = next(read_rows(finished_run.latest("seeds").shards()[0]))
    ended = command("inspect", finished_run.path, "seeds", row["id"])
    assert ended.code == 0
    for message in row["messages"]:
        assert f"{message['role']}: {message['content']}" in ended.out


def test_inspect_prints_texts_as_they_are(command, make_config, tmp_path):
    texts = [f"[bold]{number}[/bold] :smile: [/]" for number in range(30)]
    (tmp_path / "seeds.jsonl").write_text(
        "".join(json.dumps({"prompt": text}) + "\n" for text in texts)
    )
    config = make_config(tmp_path, seeds__sources=[{"path": str(tmp_path / "seeds.jsonl")}])
    run = run_again(config, until="seeds")
    assert f"user: {texts[7]}\n" in command("inspect", run.path, "seeds", "seeds:7").out


def test_inspect_finds_a_row_by_number_and_by_id(command, finished_run):
    rows = stored(finished_run.latest("generate"))
    by_number = command("inspect", finished_run.path, "generate", 17).out
    assert rows[17]["id"] in by_number.splitlines()[0]
    assert command("inspect", finished_run.path, "generate", rows[17]["id"]).out == by_number


def test_inspect_colours_what_the_target_wrote_and_nothing_else(finished_run, tiny_target):
    tokenizer = load_tokenizer(TargetSpec(str(tiny_target)))
    row = next(read_rows(finished_run.latest("generate").shards()[0]))
    text = coloured(TokenRow.of(row), tokenizer)
    assert text.plain.startswith("<|user|>")
    green = [
        text.plain[span.start : span.end]
        for span in text.spans
        if span.style == COLOURS["assistant"]
    ]
    answers = [
        tokenizer.decode(row["input_ids"][span["start"] : span["end"]]) for span in row["spans"]
    ]
    assert green == [visible(answer) for answer in answers]


def test_inspect_says_what_features_are(command, finished_run):
    row = next(read_rows(finished_run.latest("features").shards()[0]))
    out = command("inspect", finished_run.path, "features").out
    assert (
        f"{len(row['positions'])} positions of 64 × float32, last hidden state after the final norm"
        in out
    )


def test_inspect_shows_the_summary_of_a_stage_without_rows(command, finished_run):
    out = command("inspect", finished_run.path, "calibrate").out
    assert json.loads(out)["tree"]["nodes"] == 8


def test_inspect_shows_no_empty_summary_for_one_that_cannot_be_read(command, copied_run):
    (copied_run.latest("calibrate").path / "DONE.json").write_text("{")
    ended = command("inspect", copied_run.path, "calibrate")
    assert (
        ended.code == 3 and "DONE.json cannot be read" in one_paragraph(ended.err) and not ended.out
    )


def test_inspect_counts_the_rows_of_the_shards_that_were_written(command, copied_run):
    said = command("inspect", copied_run.path, "generate", 0).out
    first = copied_run.latest("generate").shard_path(0)
    shutil.copy(
        copied_run.latest("generate").shard_path(3), first.with_name("!.parquet")
    )  # sorted, it is the first
    assert command("inspect", copied_run.path, "generate", 0).out == said
    first.unlink()
    ended = command("inspect", copied_run.path, "generate", 0)
    assert ended.code == 3 and str(first) in one_paragraph(ended.err) and not ended.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("seeds", "seeds:4000"), "no row 'seeds:4000' among the 40 rows"),
        (("seeds", "4000"), "no row '4000'"),
        (("seeds", "²"), "no row '²'"),
        (("sedes",), "no stage 'sedes'"),
        (("push",), "has not reached push"),
    ],
)
def test_inspect_names_what_is_not_there(command, finished_run, words, says):
    ended = command("inspect", finished_run.path, *words)
    assert ended.code == 2 and says in one_paragraph(ended.err)
