"""`inspect` shows a row as a person reads it."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.artifacts.generated_rows import TokenRow
from pipeline.cli.inspect import COLOURS, coloured_text
from pipeline.formatting import visible
from pipeline.targets.spec import TargetSpec, load_tokenizer
from tests.cli.tables import one_paragraph
from tests.flows.tiny import run_again, stored


def test_a_seed_is_shown_as_it_was_said(command, make_config, tmp_path):
    texts = [f"[bold]{number}[/bold] :smile: [/]" for number in range(30)]
    lines = "".join(json.dumps({"data": [text, f"so {text}"]}) + "\n" for text in texts)
    (tmp_path / "seeds.jsonl").write_text(lines)
    config = make_config(tmp_path, seeds__sources=[{"path": str(tmp_path / "seeds.jsonl")}])
    run = run_again(config, until="seeds")
    out = command("inspect", run.path, "seeds", "seeds:7").out
    assert f"user: {texts[7]}\nassistant: so {texts[7]}\n" in out


def test_a_row_is_found_by_number_and_by_id(command, copied_run):
    """Only the shards that were written count, and a lost one is named."""
    stage = copied_run.latest("generate")
    rows = stored(stage)
    first = stage.shard_path(0)
    shutil.copy(stage.shard_path(3), first.with_name("!.parquet"))  # sorted, it is the first
    out = command("inspect", copied_run.path, "generate", 17).out
    assert rows[17]["id"] in out.splitlines()[0]
    assert command("inspect", copied_run.path, "generate", rows[17]["id"]).out == out
    first.unlink()
    ended = command("inspect", copied_run.path, "generate", 0)
    assert ended.code == 3 and str(first) in one_paragraph(ended.err) and not ended.out


def test_target_written_text_alone_is_coloured(finished_run, tiny_target):
    tokenizer = load_tokenizer(TargetSpec(str(tiny_target)))
    row = stored(finished_run.latest("generate"))[0]
    text = coloured_text(TokenRow.of(row), tokenizer)
    assert text.plain.startswith("<|user|>")
    green, answers = [], []
    for span in text.spans:
        if span.style == COLOURS["assistant"]:
            green.append(text.plain[span.start : span.end])
    for span in row["spans"]:
        answers.append(visible(tokenizer.decode(row["input_ids"][span["start"] : span["end"]])))
    assert green == answers


def test_row_features_are_described(command, copied_run, again):
    again(train__heads="eagle3", train__eagle3__layers=[1, 2], until="row-features")
    row = stored(copied_run.latest("row-features"))[0]
    out = command("inspect", copied_run.path, "row-features").out
    assert f"{len(row['input_ids'])} states each in layer_1, layer_2" in out


def test_features_and_summaries_are_described(command, copied_run):
    row = stored(copied_run.latest("features"))[0]
    out = command("inspect", copied_run.path, "features").out
    assert f"{len(row['positions'])} states" in out
    out = command("inspect", copied_run.path, "calibrate").out
    assert json.loads(out)["tree"]["nodes"] == 8
    (copied_run.latest("calibrate").path / "DONE.json").write_text("{")
    ended = command("inspect", copied_run.path, "calibrate")
    assert ended.code == 3 and "DONE.json" in one_paragraph(ended.err) and not ended.out


@pytest.mark.parametrize(
    "words", [("seeds", "seeds:4000"), ("seeds", "4000"), ("sedes",), ("push",)]
)
def test_what_is_not_there_is_named(command, finished_run, words):
    ended = command("inspect", finished_run.path, *words)
    assert ended.code == 2 and words[-1] in one_paragraph(ended.err)
