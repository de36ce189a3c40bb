"""The model card: read by the Hub, by a shell, and by a person before and after the check."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from huggingface_hub import ModelCard

from pipeline.export.card import model_card
from pipeline.heads.medusa import MedusaHeads

REPORT = {
    "target": "/home/me/models/secret",
    "method": "medusa-1",
    "num_heads": 3,
    "seeds": {"rows": 400, "quarantined": 3},
    "generate": {"rows": 390, "tokens": 123456, "tokens_per_second": 900.0},
    "features": {"positions": 120000, "bytes_per_position": 1024.5, "tokens_per_second": 5000.0},
    "train": {"tokens": 240000, "tokens_per_second": 8000.0, "final_loss": 3.14159},
    "heads": [{"top1": 0.512, "top5": 0.789}, {"top1": 0.3, "top5": 0.59}, {"top1": 0.2, "top5": float("nan")}],
    "tree": {"nodes": 63, "expected_acceleration_rate": 2.4},
    "check": {
        "passed": True,
        "native": {
            "acceleration_rate": 2.31,
            "overhead": 1.2,
            "speedup": 1.925,
            "tokens_per_second": 1234.5,
            "baseline_tokens_per_second": 641.2,
            "greedy_match": {"sequences": 32, "identical": 31, "ties": 1},
        },
        "vllm": {"acceleration_rate": 1.8, "greedy_match": {"sequences": 32, "identical": 32, "ties": 0}},
    },
    "hardware": {"cpu": "2 cores"},
    "versions": {"torch": "2.13.0"},
    "seconds_by_stage": {"seeds": 1.0},
}
RECIPE = {
    "target": {"model": "/home/me/models/secret", "dtype": "bfloat16", "quantization": None},
    "seeds": {"sources": [{"hub": "owner/chats", "path": None}, {"hub": None, "path": "/home/me/private.jsonl"}]},
    "generate": {"mode": "replay", "temperature": 0.7, "holdout_temperature": 0.0},
    "train": {
        "method": "medusa-1",
        "num_heads": 3,
        "heads": "medusa",
        "medusa": {"num_layers": 1},
        "lr": 0.001,
        "roles": ["assistant"],
    },
    "export": {"formats": ["expanded"]},
}


def card_of(report=REPORT, recipe=RECIPE, base_model="owner/target", repo_id="me/heads", **more) -> str:
    return model_card(report, kind=MedusaHeads, base_model=base_model, repo_id=repo_id, recipe=recipe, **more)


def table_under(card: str, heading: str) -> list[list[str]]:
    section = card.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def test_the_front_matter_is_what_the_hub_reads():
    data = ModelCard(card_of()).data
    assert (data.base_model, data.pipeline_tag) == ("owner/target", "text-generation")
    assert data.datasets == ["owner/chats"]
    assert {"medusa", "speculative-decoding"} <= set(data.tags)


def test_the_vllm_command_can_be_pasted_into_a_shell():
    alone, command = re.findall(r"```bash\n(vllm serve.*?)```", card_of(), re.DOTALL)
    assert shlex.split(alone) == ["vllm", "serve", "me/heads"]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:4] == ["vllm", "serve", "owner/target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "medusa", "model": "me/heads", "num_speculative_tokens": 3}


def test_the_kind_says_what_its_heads_are_and_which_other_engines_load_them():
    card = card_of()
    assert "# Medusa heads for owner/target" in card and "guesses the token at t+2+k.\nThe target verifies" in card
    assert "text-generation-launcher" in card and "TensorRT-LLM" in card


def test_every_head_has_its_row_of_held_out_accuracies():
    rows = table_under(card_of(), "Accuracy of the heads")
    assert rows[0] == ["head", "guesses", "top-1", "top-5"]
    assert rows[2:] == [["0", "t+2", "51.2%", "78.9%"], ["1", "t+3", "30.0%", "59.0%"], ["2", "t+4", "20.0%", "-"]]


def test_both_engines_stand_side_by_side():
    rows = {row[0].split(" (")[0]: row[1:] for row in table_under(card_of(), "Results")}
    assert rows[""] == ["native, tree", "vLLM, top-1 chain"]
    assert rows["acceleration rate"] == ["2.31", "1.80"]
    assert rows["overhead"] == ["1.20", "-"]
    assert rows["greedy sequences identical"] == ["31 of 32, 1 parted at a tie", "32 of 32"]


@pytest.mark.parametrize("report", [{}, {"num_heads": 3}, {key: REPORT[key] for key in REPORT if key != "check"}])
def test_before_the_check_the_card_says_so_and_shows_no_figure(report):
    card = card_of(report)
    assert "not been checked yet" in card
    assert "2.31" not in card


@pytest.mark.parametrize("gone", [*REPORT, "everything"])
@pytest.mark.parametrize("recipe", [RECIPE, {}])
def test_whatever_is_missing_leaves_no_hole(gone, recipe):
    report = {} if gone == "everything" else {key: value for key, value in REPORT.items() if key != gone}
    card = card_of(report, recipe)
    assert not re.search(r"\b(None|nan|Undefined)\b|\{\{|\{%", card)
    assert "\n\n\n" not in card
    assert ModelCard(card).data.base_model == "owner/target"
    headings = re.findall(r"(?m)^.*\n\n?## ", card)
    assert all(found.endswith("\n\n## ") or found.startswith("#") for found in headings)


@pytest.mark.parametrize("base_model", ["/home/me/models/secret", None])
def test_a_local_target_is_never_named(base_model):
    card = card_of(base_model=base_model)
    assert "/home" not in card and "secret" not in card and "private" not in card
    assert "a local model" in card
    assert ModelCard(card).data.base_model is None


def test_a_failed_check_is_said_in_the_card():
    report = REPORT | {"check": REPORT["check"] | {"passed": False, "failures": ["vLLM accepted nothing."]}}
    assert "**The check failed.** vLLM accepted nothing." in card_of(report)


@pytest.mark.parametrize(("num_layers", "tgi"), [(1, "--model-id me/heads"), (2, "TGI cannot load these heads")])
def test_the_shared_format_tells_which_engines_cannot_load_it(num_layers, tgi):
    train = RECIPE["train"] | {"medusa": {"num_layers": num_layers}}
    card = card_of(recipe=RECIPE | {"train": train, "export": {"formats": ["shared"]}})
    assert "TensorRT-LLM cannot load these heads" in card
    assert tgi in card


@pytest.mark.parametrize(
    ("mode", "said"),
    [("replay", "fed to the target"), ("self-talk", "both sides"), ("passthrough", "not the target's")],
)
def test_the_card_says_who_wrote_the_training_text(mode, said):
    recipe = RECIPE | {"generate": RECIPE["generate"] | {"mode": mode}}
    assert said in card_of(recipe=recipe)
