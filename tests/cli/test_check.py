"""`check`: heads that were not made here, measured on their target without a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.artifacts.check_result import (
    CheckResult,
    GreedyMatch,
    LoadRow,
    ServedMethod,
    VllmFigures,
)
from tests.cli.tables import one_paragraph

QUICK = ("--number", "3", "--max-new-tokens", "12", "--repeats", "1")


@pytest.fixture
def checked(command, tiny_target, tiny_seeds):
    def call(heads: object, *words: object, engine: str = "native", prompts: Path = tiny_seeds):
        given = ("--target", tiny_target, "--prompts", prompts, "--engine", engine)
        return command("check", heads, *given, *QUICK, *words)

    return call


def test_a_run_and_its_pickle_alone_are_measured(checked, finished_run, tmp_path):
    export = finished_run.latest("export").path
    own = checked(finished_run.path, "--out", tmp_path / "own")
    assert own.code == 0, own.err
    tensors = load_file(export / "medusa_lm_head.safetensors")
    (tmp_path / "other").mkdir()
    torch.save(tensors, tmp_path / "other" / "medusa_lm_head.pt")
    other = checked(tmp_path / "other", "--out", tmp_path / "found")
    assert other.code == 0, other.err
    for name in ("own", "found"):
        found = json.loads((tmp_path / name / "check.json").read_text())
        native = found["check"]["native"]
        assert native["greedy_match"]["identical"] == 6
        assert found["check"]["passed"] is True and native["acceleration_rate"] > 1
    assert "acceleration rate" in other.out and "3 Medusa heads" in other.out
    assert len((tmp_path / "found" / "answers" / "medusa.jsonl").read_text().splitlines()) == 3


def test_another_setting_is_refused_with_its_option(checked):
    for word, fix in (
        ("check.max_new_tokens=32", "Use --max-new-tokens 32."),
        ("check.acceptance=typical", "Write target.KEY=VALUE"),
    ):
        ended = checked("heads", word)
        assert ended.code == 2 and word in ended.err and fix in ended.err


def test_advice_is_what_this_command_accepts(checked, finished_run, tmp_path):
    """Its options in place of a run's settings, and no settings of seeds, which it has not."""
    unknown = tmp_path / "unknown.jsonl"
    unknown.write_text('{"colour": "red"}\n' * 8)
    ended = checked(finished_run.path, prompts=unknown)
    said = one_paragraph(ended.err)
    assert ended.code == 3 and "`prompt`" in said and "seeds." not in said
    ended = checked(finished_run.path, "--gpus", 99)
    said = one_paragraph(ended.err)
    assert ended.code == 4 and "--gpus" in said and "gpus_per_worker" not in said
    ended = checked(finished_run.path, "--max-new-tokens", 500)
    said = one_paragraph(ended.err)
    assert ended.code == 3 and "--max-new-tokens" in said and "check.max" not in said


def asked_of_vllm(monkeypatch, accepted: float) -> list[dict]:
    """Replace vLLM, and return the list of the speculative configurations that it would get."""
    asked: list[dict] = []

    def served(request, progress):
        asked.append(dict(request.speculative_config))
        match = GreedyMatch(6, 6, 0, 500)
        rates = {"acceleration_rate": 1 + accepted, "accepted_per_position": [accepted]}
        speeds = {"tokens_per_second": 9.0, "baseline_tokens_per_second": 6.0}
        load = {"loads": [LoadRow(method="heads", requests=1, **speeds)]}
        methods = [ServedMethod(name="heads", greedy_match=match)]
        return CheckResult(vllm=VllmFigures(greedy_match=match, methods=methods, **rates, **load))

    monkeypatch.setattr("pipeline.evaluation.measuring.check_served", served)
    return asked


def test_vllm_drafts_as_asked_and_has_to_accept(checked, finished_run, tmp_path, monkeypatch):
    export, asked = finished_run.latest("export").path, asked_of_vllm(monkeypatch, accepted=0.0)
    ended = checked(export, "--engine", "vllm", "--draft-tokens", 2, "--out", tmp_path)
    assert ended.code == 1 and "no draft token was accepted" in one_paragraph(ended.err)
    assert json.loads((tmp_path / "check.json").read_text())["check"]["passed"] is False
    expected = {"method": "medusa", "model": str(export.resolve()), "num_speculative_tokens": 2}
    assert asked == [expected]
    refused = checked(export, "--draft-tokens", 4)
    assert refused.code == 2 and "propose 3 tokens ahead" in one_paragraph(refused.err)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (
            lambda export: None,
            3,
            "another hidden size or vocabulary",
        ),
        (
            lambda export: (export / "config.json").unlink(),
            3,
            "[301, 64] instead of [300, 64]",
        ),
        (lambda export: shutil.rmtree(export), 2, "There is no directory"),
        (lambda export: [path.unlink() for path in export.iterdir()], 3, "no weights"),
    ],
)
def test_what_cannot_be_measured_is_one_paragraph(checked, tmp_path, change, code, says):
    from tests.export.exports import config_of, write

    export = write(tmp_path / "export", config_of(hidden_size=64, vocab_size=301), choices=[[0]])
    change(export)
    ended = checked(export)
    assert ended.code == code and says in one_paragraph(ended.err)


def test_another_kind_of_draft_is_named(checked, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DFlashDraftModel"]}))
    save_file({"d2t": torch.zeros(4, dtype=torch.int64)}, tmp_path / "model.safetensors")
    ended = checked(tmp_path)
    assert ended.code == 3 and "of the kind dflash" in one_paragraph(ended.err)


def test_heads_with_attention_are_served_by_vllm_only(checked, tmp_path, monkeypatch):
    asked = asked_of_vllm(monkeypatch, accepted=0.5)
    attention = {"layers.0.self_attn.o_proj.weight": torch.ones(64, 64)}
    save_file({"fc.weight": torch.zeros(64, 128)} | attention, tmp_path / "model.safetensors")
    ended = checked(tmp_path)
    assert ended.code == 3 and "--engine vllm" in one_paragraph(ended.err) and not asked
    questions = tmp_path / "questions.jsonl"  # one turn each, so vLLM writes no first answers
    questions.write_text('{"prompt": "red"}\n{"prompt": "why cat"}\n{"prompt": "how"}\n')
    served = checked(tmp_path, "--draft-tokens", 3, engine="vllm", prompts=questions)
    assert served.code == 0 and "an EAGLE-1 model with attention" in served.out
    assert asked == [{"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 3}]
    advice = served.out.index("- 1 request at a time: heads, 1.50x plain (one repeat).")
    assert 0 < served.out.index("- Rough figures: the check decoded 6 prompts.") < advice
    assert advice < served.out.index("Check  ")
    assert "RUN_DIR" not in served.out
