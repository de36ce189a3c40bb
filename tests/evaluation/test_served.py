"""The figures of the served check; the target is loaded only where sequences differ."""

from __future__ import annotations

import pytest

from pipeline.artifacts.tree_file import Calibration
from pipeline.config import CheckConfig
from pipeline.evaluation import served
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.evaluation.served import chain_promise
from pipeline.export.layout import ExportLayout
from pipeline.heads.medusa import MedusaShape
from pipeline.targets.spec import TargetSpec

PROMPTS = [Prompt("a", [0, 5]), Prompt("b", [0, 6])]


@pytest.fixture
def check(monkeypatch, tiny_target):
    def run(plain: list[list[int]], accelerated: list[list[int]], **figures):
        asked = {
            "num_drafts": 8,
            "accepted_per_position": [4, 2, 0],
            "acceleration_rate": 1.75,
            "tokens_per_second": 30.0,
            "model_runner": "V1",
        }
        decoded = {
            "plain": {"token_ids": plain, "tokens_per_second": 20.0, "model_runner": "V2"},
            "accelerated": {"token_ids": accelerated, **asked, **figures},
        }
        monkeypatch.setattr(served, "vllm_decode_check", lambda *arguments, **more: decoded)
        layout = ExportLayout("owner/target", MedusaShape(hidden_size=64, vocab_size=300, num_heads=3))
        monkeypatch.setattr(served, "read_layout", lambda _: layout)
        return served.check_served(CheckRequest(TargetSpec(str(tiny_target)), "export", PROMPTS, CheckConfig()))

    return run


def test_figures_are_per_draft_and_equal_sequences_load_no_target(check, monkeypatch):
    monkeypatch.setattr(served, "load_causal_lm", None)
    found = check([[1, 2], [3]], [[1, 2], [3]])
    assert found == {
        "vllm": {
            "num_speculative_tokens": 3,
            "export_alone": False,
            "acceleration_rate": 1.75,
            "accepted_per_position": [0.5, 0.25, 0.0],
            "speedup": 1.5,
            "tokens_per_second": 30.0,
            "baseline_tokens_per_second": 20.0,
            "model_runners": {"plain": "V2", "with heads": "V1"},
            "greedy_match": {"sequences": 2, "identical": 2, "ties": 0},
            "tie_tolerance": 1e-4,
        },
        "differing": [],
    }


def test_where_sequences_differ_the_target_s_own_gap_decides(check, tiny_target):
    import torch
    from transformers import AutoModelForCausalLM

    found = check([[1, 2], [3, 9]], [[1, 2], [3, 8]])
    logits = AutoModelForCausalLM.from_pretrained(tiny_target)(torch.tensor([[0, 6, 3]])).logits[0, -1]
    best, second = logits.topk(2).values.tolist()
    assert found["vllm"]["greedy_match"] == {"sequences": 2, "identical": 1, "ties": 0}
    (differing,) = found["differing"]
    assert (differing["id"], differing["at"]) == ("b", 1) and differing["gap"] == pytest.approx(best - second, abs=1e-5)


def test_without_a_single_draft_nothing_was_accepted(check):
    found = check([[1], [3]], [[1], [3]], num_drafts=0, accepted_per_position=[0, 0, 0], acceleration_rate=1.0)
    assert found["vllm"]["accepted_per_position"] == [0.0, 0.0, 0.0]


CALIBRATION = Calibration(
    choices=((0,),),
    node_shares=[0.4],
    accuracies=[[0.4]],
    expected_acceleration_rate=1.4,
    expected_standard_error=0.1,
    num_speculative_tokens=2,
    chain=[
        {"draft_tokens": 1, "expected_acceleration_rate": 1.4, "expected_standard_error": 0.1},
        {"draft_tokens": 2, "overhead": 1.2, "expected_acceleration_rate": 1.8, "expected_standard_error": 0.2},
    ],
    num_conversations=64,
)


def test_the_chain_is_expected_to_reach_what_held_out_text_and_the_same_text_say():
    held_out = {"expected_acceleration_rate": 1.8, "expected_standard_error": 0.2}
    same_text = {"acceleration_rate": 1.9, "standard_error": 0.15}
    walked = {"same_text_acceleration_rate": 1.9, "standard_error": 0.15}
    assert chain_promise(CALIBRATION, same_text, 16) == held_out | walked
    assert chain_promise(CALIBRATION, same_text, None) == walked, "questions are another kind of text"
    assert chain_promise(CALIBRATION, None, None) == {}
    fewer = chain_promise(CALIBRATION, None, 16)
    assert fewer == held_out | {"standard_error": 0.4}, "a quarter of the conversations, twice the error"
