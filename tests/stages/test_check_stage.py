"""The check asks held-out questions, and says no when it must."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.artifacts.check_result import CheckResult, GreedyMatch, VllmFigures
from pipeline.artifacts.json_form import to_json
from pipeline.errors import CheckFailed, ConfigError, DataError, EnvironmentFault
from pipeline.evaluation.served import LoadStudy
from pipeline.flow import push_run, run_flow
from pipeline.run.check_engines import PARTS
from pipeline.stages import check
from pipeline.storage.shards import read_rows
from tests.flows.tiny import NEW_TOKENS, context_of, last_events, stages_run
from tests.targets.quantized_copies import compressed

SERVED = CheckResult(
    vllm=VllmFigures(
        acceleration_rate=1.5, accepted_per_position=[0.5], greedy_match=GreedyMatch(8, 8, 0)
    )
)


def run_again(config):
    return run_flow(config, executor="inline", console=Console(quiet=True))


def test_a_failed_check_is_finished_reported_and_says_no_again_and_another_limit_decodes_nothing(
    copied_run, make_config, tmp_path
):
    config = make_config(tmp_path, check__min_acceleration_rate=50)
    for _ in range(2):
        with pytest.raises(CheckFailed, match=r"acceleration rate 1\.\d\d is below") as caught:
            run_again(config)
        assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
        assert stages_run(copied_run) == [], (
            "the figures are stored, the limit is not among what they depend on"
        )
        assert "run-finished" not in {event["event"] for event in last_events(copied_run)}
    report = json.loads((copied_run.path / "report.json").read_text())
    assert report["check"]["passed"] is False and len(report["check"]["failures"]) == 1
    with pytest.raises(CheckFailed):
        push_run(
            copied_run.path,
            repo_id="me/heads",
            private=False,
            base_model="owner/target",
            dry_run=True,
        )

    run = run_again(
        make_config(tmp_path, check__min_acceleration_rate=1, check__slo={"ttft_ms": 100})
    )
    assert stages_run(run) == [] and "run-finished" in {
        event["event"] for event in last_events(run)
    }
    report = json.loads((run.path / "report.json").read_text())
    assert report["check"]["passed"] is True and report["check"]["failures"] == []
    push_run(run.path, repo_id="me/heads", private=False, base_model="owner/target", dry_run=True)


@pytest.mark.slow
def test_a_file_of_questions_is_asked_instead_of_held_out_rows(copied_run, make_config, tmp_path):
    questions = tmp_path / "questions.jsonl"
    rows = [
        {"question_id": n, "category": f"c{n % 2}", "turns": [f"why {n}?", "how?"]}
        for n in range(5)
    ]
    rows.append({"question_id": 9, "category": "c1", "turns": ["moon " * 400]})
    rows[0]["reference"] = ["nobody says that", "nor that"]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = make_config(tmp_path, check__prompts=str(questions), check__baselines=["generate"])
    stage = run_again(config).latest("check")
    native = stage.summary["native"]
    assert (native["prompts"], native["skipped_prompts"]) == (10, 1), (
        "both turns of each, and one that does not fit"
    )
    assert [(row["category"], row["prompts"]) for row in native["categories"]] == [
        ("c0", 6),
        ("c1", 4),
    ]
    assert [row["name"] for row in native["baselines"]] == ["generate"]
    assert native["baselines"][0]["greedy_match"] == {"sequences": 10, "identical": 10, "ties": 0}
    for method in ("plain", "medusa"):
        lines = [
            json.loads(line)
            for line in (stage.path / f"answers/{method}.jsonl").read_text().splitlines()
        ]
        assert [line["question_id"] for line in lines] == [0, 1, 2, 3, 4]
        assert {line["model_id"] for line in lines} == {
            f"{Path(config.target.model).name}-{method}"
        }
        assert all(len(line["choices"][0]["turns"]) == 2 for line in lines)
    lengths = [length for line in lines for length in line["choices"][0]["accept_lengths"]]
    assert sum(lengths) / len(lengths) == pytest.approx(native["acceleration_rate"], abs=1e-3)
    assert "answers" not in stage.summary, "texts are in files, not in DONE.json"
    (beside, _) = native["categories"]
    assert (
        beside["baselines"]["generate"]["acceleration_rate"] == 1.0
        and beside["baselines"]["generate"]["speedup"] > 0
    )
    assert stage.summary["exact_match"] == [
        {"category": "c0", "answers": 2, "plain": 0.0, "medusa": 0.0}
    ]
    assert {path.name for path in (stage.path / "model_answer").iterdir()} == {
        f"{Path(config.target.model).name}-{method}.jsonl" for method in ("plain", "medusa")
    }
    for path in (stage.path / "model_answer").iterdir():
        for judged, line in zip(map(json.loads, path.read_text().splitlines()), lines, strict=True):
            assert judged.keys() == {"question_id", "answer_id", "model_id", "choices", "tstamp"}
            assert judged["model_id"] == path.stem and judged["question_id"] == line["question_id"]
            assert judged["choices"] == [{"index": 0, "turns": line["choices"][0]["turns"]}], (
                "greedy text is the same"
            )

    questions.write_text(json.dumps(rows[0]) + "\n")
    assert run_again(config).latest("check").summary["native"]["prompts"] == 2, "its content counts"
    questions.write_text(json.dumps(rows[5]) + "\n")
    with pytest.raises(DataError, match=f"No question leaves room for {NEW_TOKENS} tokens"):
        run_again(config)


def test_a_question_longer_than_what_is_learned_from_is_asked_all_the_same(make_config, tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"turns": ["moon " * 25]}) + "\n")
    short = {"target__max_tokens": 64, "generate__max_new_tokens": 12, "generate__rounds": 1}
    check = {"check__prompts": str(questions), "check__max_new_tokens": 20}
    native = run_again(make_config(tmp_path, **short, **check)).latest("check").summary["native"]
    assert (native["prompts"], native["skipped_prompts"]) == (1, 0)
    with pytest.raises(
        DataError, match=r"No question leaves room for 20 tokens.*raise check\.max_tokens"
    ):
        run_again(make_config(tmp_path, **short, **check, check__max_tokens=64))


def test_prompts_that_leave_no_room_are_skipped_and_when_none_is_left_it_says_so(
    copied_run, make_config, tmp_path
):
    with pytest.raises(DataError, match="No held-out prompt leaves room for 190 tokens"):
        run_again(make_config(tmp_path, check__max_new_tokens=190))


@pytest.mark.slow
def test_an_assistant_is_named_and_its_content_counts(
    copied_run, make_config, tmp_path, tiny_target
):
    with pytest.raises(ConfigError, match="come together"):
        make_config(tmp_path, check__baselines=["assistant"])
    with pytest.raises(ConfigError, match=r"does not exist \(check\.assistant_model\)"):
        nowhere = str(tmp_path / "nowhere")
        run_again(
            make_config(tmp_path, check__baselines=["assistant"], check__assistant_model=nowhere)
        )
    assistant = shutil.copytree(tiny_target, tmp_path / "small")
    config = make_config(
        tmp_path, check__baselines=["assistant"], check__assistant_model=str(assistant)
    )
    first = run_again(config).latest("check")
    (row,) = first.summary["native"]["baselines"]
    assert row["greedy_match"]["identical"] == 8 and row["acceleration_rate"] >= 1.5, (
        "it guesses as the target writes"
    )
    moved = assistant.rename(tmp_path / "elsewhere")
    config = make_config(
        tmp_path, check__baselines=["assistant"], check__assistant_model=str(moved)
    )
    assert run_again(config).latest("check").fingerprint == first.fingerprint


@pytest.mark.slow
def test_typical_acceptance_is_measured_and_greedy_decoding_compared_all_the_same(
    copied_run, make_config, tmp_path
):
    rule = {"check__acceptance": "typical", "check__temperature": 0.7, "check__studies": ["heads"]}
    native = (
        run_again(make_config(tmp_path, **rule, check__repeats=2)).latest("check").summary["native"]
    )
    assert native["acceptance"] == "typical" and native["repeats"] == 2
    assert (native["eps"], native["delta"], native["first_token"]) == (0.09, 0.3, "greedy")
    assert native["log_likelihood"].keys() == {"greedy", "sampling", "typical"}
    assert native["log_likelihood"]["greedy"] > native["log_likelihood"]["sampling"], (
        "greedy text is likelier"
    )
    assert native["studies"].keys() == {"heads"} and native["studies"]["heads"]
    assert (
        native["greedy_match"]["identical"] + native["greedy_match"]["ties"]
        == native["greedy_match"]["sequences"]
    )


def test_what_was_decoded_natively_is_kept_when_vllm_fails(
    copied_run, make_config, tmp_path, monkeypatch
):
    def out_of_memory(*_):
        raise EnvironmentFault(
            "vLLM cannot start: out of memory.", "check.engines: vllm", "Free memory."
        )

    config = make_config(tmp_path, check__engines=["native", "vllm"])
    monkeypatch.setattr("pipeline.evaluation.measuring.check_served", out_of_memory)
    with pytest.raises(EnvironmentFault, match="out of memory"):
        run_again(config)
    monkeypatch.setattr("pipeline.evaluation.measuring.check_served", lambda *_: SERVED)
    monkeypatch.setattr(
        "pipeline.evaluation.measuring.check_native",
        lambda *_: pytest.fail("it has been decoded already"),
    )
    stage = run_again(config).latest("check")
    assert (
        stage.summary["native"]["prompts"] == 8
        and stage.summary["vllm"].items() >= to_json(SERVED.vllm).items()
    )
    chain, promise = (
        copied_run.latest("calibrate").summary["tree"]["chain"][-1],
        stage.summary["vllm"],
    )
    assert promise["expected_acceleration_rate"] == chain["expected_acceleration_rate"]
    assert (
        promise["same_text_acceleration_rate"]
        == stage.summary["native"]["chain"]["acceleration_rate"]
    )
    assert {path.name for path in (stage.path / "answers").iterdir()} == {
        "plain.jsonl",
        "medusa.jsonl",
    }
    assert not (stage.path / "native.json").exists(), "DONE.json has it"


def test_what_vllm_decoded_is_kept_when_its_server_fails_under_load(
    copied_run, make_config, tmp_path, monkeypatch
):
    def no_server(**_):
        raise EnvironmentFault(
            "vLLM's server ended with status 1: no port.", "check.studies: load", "Try again."
        )

    config = make_config(tmp_path, check__engines=["vllm"], check__studies=["load"])
    monkeypatch.setattr("pipeline.evaluation.measuring.check_served", lambda *_: SERVED)
    monkeypatch.setattr("pipeline.run.check_engines.load_study", no_server)
    with pytest.raises(EnvironmentFault, match="no port"):
        run_again(config)
    study = LoadStudy([], "The heads pay.")
    monkeypatch.setattr("pipeline.run.check_engines.load_study", lambda **_: study)
    monkeypatch.setattr(
        "pipeline.evaluation.measuring.check_served",
        lambda *_: pytest.fail("it has decoded already"),
    )
    stage = run_again(config).latest("check")
    rows = {"studies": {"load": []}, "under_load": "The heads pay."}
    assert stage.summary["vllm"].items() >= (to_json(SERVED.vllm) | rows).items()
    assert not any((stage.path / f"{part}.json").exists() for part in PARTS), "DONE.json has them"


def test_while_it_decodes_a_line_now_and_then_says_how_far_it_is(
    copied_run, make_config, tmp_path, monkeypatch
):
    """One question stands in a training row, of which the report warns."""
    monkeypatch.setattr("pipeline.execution.progress.SECONDS_BETWEEN_LINES", 0.0)
    questions, out = tmp_path / "questions.jsonl", io.StringIO()
    rows = [
        row
        for path in copied_run.latest("generate").shards()
        for row in read_rows(path)
        if row["split"] == "train"
    ]
    trained = rows[0]["messages"][0]["content"]
    asked = [f"{trained.upper()}!", "why 1?", "why 2?", "why 3?"]
    questions.write_text(
        "".join(json.dumps({"turns": [question, "how?"]}) + "\n" for question in asked)
    )
    asking = {"check__prompts": str(questions), "seeds__decontaminate": False}
    config = make_config(tmp_path, **asking, check__repeats=2, check__studies=["heads"])
    run = run_flow(config, executor="inline", console=Console(file=out, width=200))
    lines = [line for line in out.getvalue().splitlines() if line.startswith("check: ")]
    assert any(
        re.fullmatch(r"check: \d of 4 answers, .+, the prompts of later turns", line)
        for line in lines
    )
    holding = sum(any(message["content"] == trained for message in row["messages"]) for row in rows)
    assert run.latest("check").summary["contaminated_rows"] == holding >= 1
    assert f"{holding} training rows hold a question of the check" in " ".join(
        out.getvalue().split()
    )
    counts = [
        int(found[1])
        for line in lines
        if (found := re.match(r"check: (\d+) of 16 prompts, .+, native", line))
    ]
    assert counts == sorted(counts) and len(set(counts)) > 2
    assert "progress.tmp" not in {path.name for path in run.latest("check").path.iterdir()}


@pytest.mark.slow
def test_heads_are_checked_on_the_copy_that_will_be_served_too(
    copied_run, make_config, tmp_path, tiny_target
):
    copy = compressed(tiny_target, tmp_path / "copy", "int8")
    run = run_again(make_config(tmp_path, check__served_model=str(copy)))
    assert stages_run(run) == ["check"]
    report = json.loads((run.path / "report.json").read_text())
    found, native = report["served_model"], report["check"]["native"]
    assert (found["model"], found["format"]) == (str(copy), "compressed-tensors (int-quantized)")
    assert found["native"]["greedy_match"] == {"sequences": 8, "identical": 8, "ties": 0}, (
        "its own text, not the target's"
    )
    assert found["native"]["acceleration_rate"] > 1 and report["check"]["passed"]
    row = next(
        line
        for line in (run.path / "report.md").read_text().splitlines()
        if line.startswith("| native | ")
    )
    assert (
        f"{native['acceleration_rate']:.2f}" in row
        and f"{found['native']['acceleration_rate']:.2f}" in row
    )
    card = (run.latest("export").path / "README.md").read_text()
    assert "(compressed-tensors (int-quantized))" in card and str(copy) not in card
    with pytest.raises(CheckFailed, match=rf"on {copy}: native: acceleration rate"):
        run_again(
            make_config(tmp_path, check__served_model=str(copy), check__min_acceleration_rate=50)
        )


@pytest.mark.parametrize("native", [1, 0])
@pytest.mark.parametrize("vllm", [1, 0])
def test_a_served_copy_is_decoded_in_the_dtype_that_its_workers_have_wherever_the_driver_is(
    make_config, tmp_path, tiny_target, native, vllm
):
    """A driver without a GPU would read a 16-bit copy as float32, and the workers would decode
    another model.
    """
    copy = shutil.copytree(tiny_target, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    placed = {
        "placement__features": {"gpus_per_worker": native},
        "placement__generate": {"gpus_per_worker": vllm},
    }
    settings = make_config(
        tmp_path, check__served_model=str(copy), check__engines=["native", "vllm"], **placed
    )
    context = context_of(settings)
    dtypes = ("float32", "bfloat16")
    expected = {"native": dtypes[native], "vllm": dtypes[vllm]}
    assert check.identity(context)["settings"]["served_model"]["dtypes"] == expected
    assert {
        engine: spec.dtype for engine, spec in context.resolved.served_copies.items()
    } == expected
