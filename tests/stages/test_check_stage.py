"""The check stage: its prompts, its verdict, and the parts that it keeps."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.artifacts.check_result import CheckResult, GreedyMatch, VllmFigures
from pipeline.artifacts.json_form import from_json
from pipeline.errors import CheckFailed, ConfigError, DataError, EnvironmentFault
from pipeline.flow import push_run, run_flow
from pipeline.stages import check
from tests.flows.tiny import (
    NEW_TOKENS,
    context_of,
    last_events,
    read_lines,
    report_of,
    stages_run,
    stored,
    write_lines,
)
from tests.targets.quantized_copies import in_int8

MEASURING = "pipeline.evaluation.measuring"
SERVED = VllmFigures(
    acceleration_rate=1.5, accepted_per_position=[0.5], greedy_match=GreedyMatch(8, 8, 0, 500)
)


def result_of(run) -> CheckResult:
    return from_json(CheckResult, run.latest("check").summary)


def test_a_report_without_text_has_no_answers(copied_run, again):
    page = copied_run.path / "report.html"
    again()
    samples = result_of(copied_run).samples
    assert page.read_text().count('<p class="answer">') == len(samples) == 2
    again(report__show_text=False)
    assert stages_run(copied_run) == []
    card = (copied_run.latest("export").path / "README.md").read_text()
    for text in (page.read_text(), card):
        assert "step by step" not in text and samples[0].prompt.strip() not in text


def test_a_failed_check_is_reported_and_another_limit_decodes_nothing(copied_run, again):
    push = {"repo_id": "me/heads", "private": False, "base_model": "owner/target", "dry_run": True}
    for _ in range(2):
        with pytest.raises(CheckFailed, match=r"acceleration rate 1\.\d\d is below") as caught:
            again(check__min_acceleration_rate=50)
        assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
        assert stages_run(copied_run) == []
        assert "run-finished" not in {event["event"] for event in last_events(copied_run)}
    found = report_of(copied_run)["check"]
    assert found["passed"] is False and "acceleration rate" in found["failures"][0]
    with pytest.raises(CheckFailed):
        push_run(copied_run.path, **push)
    run = again(check__min_acceleration_rate=0)
    assert stages_run(run) == []
    assert "run-finished" in {event["event"] for event in last_events(run)}
    found = report_of(run)["check"]
    assert found["passed"] is True and found["failures"] == []
    push_run(run.path, **push)


@pytest.mark.slow
def test_a_file_of_questions_replaces_held_out_rows(copied_run, again, tmp_path):
    questions = []
    for n in range(5):
        questions.append(
            {"question_id": n, "category": f"c{n % 2}", "turns": [f"why {n}?", "how?"]}
        )
    long = {"question_id": 9, "category": "c1", "turns": ["moon " * 400]}
    file = write_lines(tmp_path / "questions.jsonl", *questions, long)
    stage = again(check__prompts=file, check__baselines=["generate", "retrieval"]).latest("check")
    result = from_json(CheckResult, stage.summary)
    native = result.native
    assert (native.prompts, native.skipped_prompts) == (10, 1)
    counts = [(row.category, row.prompts) for row in native.categories]
    assert counts == [("c0", 6), ("c1", 4)]
    generate, retrieval = native.baselines
    assert retrieval.name == "retrieval" and retrieval.greedy_match.identical == 10
    assert generate.name == "generate" and generate.greedy_match.identical == 10
    name = Path(stage.summary["configuration"]["target"]["model"]).name
    for method in ("plain", "medusa"):
        lines = read_lines(stage.path / f"answers/{method}.jsonl")
        assert [line["question_id"] for line in lines] == [0, 1, 2, 3, 4]
        for line in lines:
            assert line["model_id"] == f"{name}-{method}" and len(line["choices"][0]["turns"]) == 2
    lengths = [length for line in lines for length in line["choices"][0]["accept_lengths"]]
    assert sum(lengths) / len(lengths) == pytest.approx(native.acceleration_rate, abs=1e-3)

    write_lines(tmp_path / "questions.jsonl", questions[0])
    other = again(check__prompts=file, check__baselines=["generate", "retrieval"])
    assert result_of(other).native.prompts == 2, "the file's content counts"
    write_lines(tmp_path / "questions.jsonl", long)
    with pytest.raises(DataError, match=f"No prompt leaves room for {NEW_TOKENS} tokens"):
        again(check__prompts=file)


def test_a_question_may_be_longer_than_training_text(again, tmp_path):
    short = {"target__max_tokens": 64, "generate__max_new_tokens": 12, "generate__rounds": 1}
    file = write_lines(tmp_path / "questions.jsonl", {"turns": ["moon " * 25]})
    asked = short | {"check__prompts": file, "check__max_new_tokens": 20}
    native = result_of(again(**asked)).native
    assert (native.prompts, native.skipped_prompts) == (1, 0)
    with pytest.raises(DataError, match=r"leaves room for 20 tokens.*check\.max_new_tokens"):
        again(**asked, check__max_tokens=64)
    with pytest.raises(DataError, match="leaves room for 190 tokens"):
        again(check__max_new_tokens=190)


@pytest.mark.slow
def test_an_assistant_s_content_counts(copied_run, again, tmp_path, tiny_target):
    with pytest.raises(ConfigError, match="come together"):
        again(check__baselines=["assistant"])
    asked = {"check__baselines": ["assistant"]}
    with pytest.raises(ConfigError, match=r"check\.assistant_model"):
        again(**asked, check__assistant_model=str(tmp_path / "nowhere"))
    assistant = shutil.copytree(tiny_target, tmp_path / "small")
    first = again(**asked, check__assistant_model=str(assistant)).latest("check")
    (row,) = from_json(CheckResult, first.summary).native.baselines
    assert row.greedy_match.identical == 8 and row.acceleration_rate >= 1.5
    moved = assistant.rename(tmp_path / "elsewhere")
    second = again(**asked, check__assistant_model=str(moved)).latest("check")
    assert second.fingerprint == first.fingerprint


def test_native_answers_are_kept_when_vllm_fails(copied_run, again, monkeypatch):
    def out_of_memory(*_):
        raise EnvironmentFault("vLLM cannot start: out of memory.", "check.engines", "Free memory.")

    engines = {"check__engines": ["native", "vllm"]}
    monkeypatch.setattr(f"{MEASURING}.check_served", out_of_memory)
    with pytest.raises(EnvironmentFault, match="out of memory"):
        again(**engines)
    monkeypatch.setattr(f"{MEASURING}.check_served", lambda *_: CheckResult(vllm=SERVED))
    monkeypatch.setattr(f"{MEASURING}.check_native", lambda *_: pytest.fail("decoded already"))
    run = again(**engines)
    result, path = result_of(run), run.latest("check").path
    assert result.native.prompts == 8 and result.vllm.accepted_per_position == [0.5]
    chain = run.latest("calibrate").summary["tree"]["chain"][-1]
    assert result.vllm.expected_acceleration_rate == chain["expected_acceleration_rate"]
    assert result.vllm.same_text_acceleration_rate == result.native.chain_rate
    assert {file.name for file in (path / "answers").iterdir()} == {"plain.jsonl", "medusa.jsonl"}
    assert not any((path / f"{part}.json").exists() for part in ("native", "vllm")), (
        "DONE.json has them"
    )


def test_a_question_of_training_is_warned_of(copied_run, make_config, tmp_path):
    rows = [row for row in stored(copied_run.latest("generate")) if row["split"] == "train"]
    trained, out = rows[0]["messages"][0]["content"], io.StringIO()
    asked = [f"{trained.upper()}!", "why 1?", "why 2?", "why 3?"]
    file = write_lines(tmp_path / "q.jsonl", *({"turns": [question, "how?"]} for question in asked))
    config = make_config(
        tmp_path,
        check__prompts=file,
        seeds__decontaminate=False,
    )
    run = run_flow(config, executor="inline", console=Console(file=out, width=200))
    holding = sum(any(message["content"] == trained for message in row["messages"]) for row in rows)
    assert result_of(run).contaminated_rows == holding >= 1
    shown = " ".join(out.getvalue().split())
    assert f"{holding} training rows hold a question of the check" in shown


@pytest.mark.slow
def test_heads_are_checked_on_the_served_copy_too(copied_run, again, tmp_path, tiny_target):
    copy = str(in_int8(tiny_target, tmp_path / "copy"))
    run = again(check__served_model=copy)
    assert stages_run(run) == ["check"]
    result = result_of(run)
    found, native = result.served_model, result.native
    assert (found.model, found.format) == (copy, "compressed-tensors (int-quantized)")
    assert found.native.greedy_match.identical == 8, "its own text, not the target's"
    assert found.native.acceleration_rate > 1 and result.passed
    (row,) = re.findall(r"^\| native \| .*", (run.path / "report.md").read_text(), re.MULTILINE)
    for engine in (native, found.native):
        assert f"{engine.acceleration_rate:.2f}" in row
    card = (run.latest("export").path / "README.md").read_text()
    assert "(compressed-tensors (int-quantized))" in card and copy not in card
    with pytest.raises(CheckFailed, match=rf"on {copy}: native: acceleration rate"):
        again(check__served_model=copy, check__min_acceleration_rate=50)


@pytest.mark.parametrize(("native", "vllm"), [(1, 0), (0, 1)])
def test_a_served_copy_has_the_dtype_of_its_workers(
    make_config, tmp_path, tiny_target, native, vllm
):
    """Wherever the driver is: without a GPU it would read a 16-bit copy as float32."""
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    settings = make_config(
        tmp_path,
        check__served_model=str(copy),
        check__engines=["native", "vllm"],
        placement__features={"gpus_per_worker": native},
        placement__generate={"gpus_per_worker": vllm},
    )
    context, dtypes = context_of(settings), ("float32", "bfloat16")
    expected = {"native": dtypes[native], "vllm": dtypes[vllm]}
    assert check.identity(context)["settings"]["served_model"]["dtypes"] == expected
    copies = context.resolved.served_copies
    assert {engine: spec.dtype for engine, spec in copies.items()} == expected
