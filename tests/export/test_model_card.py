"""The model cards: read by the Hub, by a shell, and by a person before and after the check."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml
from huggingface_hub import ModelCard

from pipeline.artifacts.json_form import from_json
from pipeline.config import Config
from pipeline.config.load import load_config, validate
from pipeline.export.card import Licence, Published, backbone_card, licence_of, model_card
from pipeline.flow import STAGES
from pipeline.report.report import Report
from tests.export.hub_stand_in import Repository
from tests.export.pushes import run_config
from tests.report.conftest import TREE

SECRET = "/home/me/models/secret"
DRIFT = {
    "kl": 0.01234,
    "perplexity": {"original": 2.1, "tuned": 2.142},
    "perplexity_change": 0.02,
    "greedy_agreement": 0.9876,
    "positions": 4321,
}
NATIVE = {
    "acceleration_rate": 2.31,
    "overhead": 1.2,
    "speedup": 1.925,
    "tokens_per_second": 1234.5,
    "baseline_tokens_per_second": 641.2,
    "greedy_match": {"sequences": 32, "identical": 31, "ties": 1},
}
VLLM = {"acceleration_rate": 1.8, "greedy_match": {"sequences": 32, "identical": 32, "ties": 0}}
REPORT = {
    "target": SECRET,
    "method": "medusa-1",
    "num_heads": 3,
    "seeds": {"rows": 400, "quarantined": 3},
    "generate": {"rows": 390, "tokens": 123456},
    "train": {"tokens": 240000, "final_loss": 3.14159},
    "heads": [
        {"labels": 9, "top1": 0.512, "top5": 0.789},
        {"labels": 9, "top1": 0.3, "top5": 0.59},
        {"labels": 9, "top1": 0.2},
    ],
    "tree": TREE | {"nodes": 63, "expected_acceleration_rate": 2.4},
    "check": {"passed": True, "failures": [], "native": NATIVE, "vllm": VLLM},
    "hardware": {"cpu": "2 cores"},
    "versions": {"torch": "2.13.0"},
}


def config_of(**sections) -> Config:
    usual = {
        "run": {"name": "secret-name"},
        "target": {"model": SECRET},
        "seeds": {"sources": [{"hub": "owner/chats"}, {"path": "/home/me/private.jsonl"}]},
        "train": {"heads": "medusa", "num_heads": 3},
    }
    return validate({**usual, **sections}, "test")


def card_of(report=REPORT, config=None, **changes) -> str:
    usual = {"base_model": "owner/target", "repo_id": "me/heads"}
    report = from_json(Report, report)
    return model_card(Published(report, config or config_of(), **{**usual, **changes}))


def with_check(**engines) -> dict:
    return {**REPORT, "check": {**REPORT["check"], **engines}}


def table_under(card: str, heading: str) -> list[list[str]]:
    section = card.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line[:1] == "|"
    ]


# --- what the Hub reads


def test_fingerprints_stand_in_the_order_of_stages_without_caches():
    found = {"train": "1", "features": "2", "tuned-features": "3", "seeds": "4", "check": "5"}
    run = {"name": "x", "date": "2026-01-01", "fingerprints": found}
    assert "Fingerprints of the stages: seeds 4, train 1, check 5." in card_of({"run": run})


def test_the_front_matter_names_model_data_and_licence():
    licence = Licence("other", "their-terms", "https://example.org/terms")
    data = ModelCard(card_of(licence=licence, data_set="me/written")).data
    assert (data.base_model, data["base_model_relation"]) == ("owner/target", "adapter")
    assert (data.pipeline_tag, data.library_name) == ("text-generation", "vllm")
    assert data.datasets == ["me/written", "owner/chats"]
    assert {"medusa", "speculative-decoding", "vllm", "speculators"} <= set(data.tags)
    assert Licence(data.license, data.license_name, data.license_link) == licence


@pytest.mark.parametrize("served", [True, False])
def test_tags_name_vllm_only_where_it_serves_the_heads(served):
    card = card_of({**REPORT, "export": {"vllm": served}}, config_of(train={"heads": "recurrent"}))
    data = ModelCard(card).data
    assert {"eagle", "recurrent"} <= set(data.tags)
    assert ({"vllm", "speculators"} <= set(data.tags)) is served and (
        "vllm serve" in card
    ) is served
    assert data.library_name == ("vllm" if served else "medusa-distill")


@pytest.mark.parametrize("link", ["LICENSE", "https://example.org/terms", None])
def test_the_licence_is_that_of_the_target_s_commit(link, tmp_path, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    cards = []
    for name in ("first", "second"):
        matter = {"license": "other", "license_name": name} | (
            {"license_link": link} if link else {}
        )
        cards.append({"README.md": f"---\n{yaml.safe_dump(matter)}---\n# A model\n".encode()})
    repository = Repository(private=False, commits=cards)
    hub.repositories["owner/target"] = repository
    commit = repository.shas[0]
    at_the_hub = (
        f"https://huggingface.co/owner/target/blob/{commit}/LICENSE" if link == "LICENSE" else link
    )
    for online in (True, False):
        assert licence_of("owner/target", commit, online=online) == Licence(
            "other", "first", at_the_hub
        )
    (tmp_path / "README.md").write_bytes(cards[0]["README.md"])
    local_link = None if link == "LICENSE" else link
    assert licence_of(str(tmp_path), None, online=False) == Licence("other", "first", local_link)


@pytest.mark.parametrize(
    "card", [None, "no front matter", "---\nlicense: [mit, apache-2.0]\n---\n", "---\n: [\n---\n"]
)
def test_a_target_without_a_readable_licence_declares_none(card, tmp_path):
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert licence_of(str(tmp_path), None, online=False) is None
    assert ModelCard(card_of()).data.license is None


# --- figures


def test_engines_stand_side_by_side_with_predictions_and_errors():
    vllm = {
        "standard_error": 0.04,
        "expected_acceleration_rate": 2.0,
        "expected_standard_error": 0.1,
    }
    report = with_check(native={**NATIVE, "standard_error": 0.05}, vllm={**VLLM, **vllm})
    report["tree"] = {
        **TREE,
        "nodes": 63,
        "expected_acceleration_rate": 2.4,
        "expected_standard_error": 0.2,
    }
    rows = {row[0].split(" (")[0]: row[1:] for row in table_under(card_of(report), "Results")}
    assert rows[""] == ["native", "vLLM"]
    assert rows["acceleration rate"] == ["2.31 ± 0.05", "1.80 ± 0.04"]
    assert rows["expected"] == ["2.40 ± 0.20", "2.00 ± 0.10"]
    assert rows["overhead"] == ["1.20x", "-"] and rows["tokens/s"] == ["1,234", "-"]
    assert rows["greedy identical"] == ["31/32", "32/32"]


def test_a_speedup_that_other_load_made_is_left_out():
    report = with_check(native={**NATIVE, "overhead": 0.9, "speedup": 2.5})
    labels = {row[0].split(" (")[0] for row in table_under(card_of(report), "Results")}
    assert not {"overhead", "speedup"} & labels and "left out" in card_of(report)
    assert "left out" not in card_of()


def test_categories_have_public_names():
    categories = [
        {"category": "chats", "prompts": 12, "acceleration_rate": 2.5, "speedup": 2.0},
        {"category": "private", "prompts": 20, "acceleration_rate": 2.1, "speedup": 1.75},
    ]
    rows = table_under(card_of(with_check(native={**NATIVE, "categories": categories})), "Results")
    chats, private = (row[:3] + row[-1:] for row in rows[-2:])
    assert chats == ["owner/chats", "12", "2.50", "2.00x"]
    assert private == ["local-2", "20", "2.10", "1.75x"]


def test_draft_lengths_are_predicted_and_served():
    chain = []
    for length in (1, 2, 3):
        predicted = {
            "expected_acceleration_rate": 1 + length / 2,
            "expected_standard_error": length / 50,
        }
        chain.append({"draft_tokens": length, "new": {"answers": 9}, **predicted})
    served = {
        "standard_error": 0.04,
        "num_speculative_tokens": 2,
        "accepted_per_position": [0.7, 0.5],
    }
    report = {
        **with_check(vllm={**VLLM, **served}),
        "tree": {**REPORT["tree"], "chain": chain},
    }
    assert table_under(card_of(report), "Results")[-3:] == [
        ["1", "1.50 ± 0.02", "-", "70%"],
        ["2", "2.00 ± 0.04", "1.80 ± 0.04", "50%"],
        ["3", "2.50 ± 0.06", "-", "-"],
    ]


def test_answers_that_are_their_reference_are_counted_by_category():
    answers = [
        {"category": "math", "answers": 12, "plain": 0.25, "medusa": 0.25},
        {"category": "a_b\n<i>", "answers": 8, "plain": 0.5},
    ]
    *_, head, _, math, odd = table_under(card_of(with_check(exact_match=answers)), "Results")
    assert head == ["category", "answers", "plain", "medusa"]
    assert (math, odd) == (["math", "12", "25.0%", "25.0%"], ["a\\_b \\<i\\>", "8", "50.0%", "-"])
    assert table_under(card_of(with_check(exact_match=[])), "Results") == table_under(
        card_of(), "Results"
    )


def test_every_head_has_its_row_of_accuracies():
    rows = table_under(card_of(), "Accuracy of the heads")
    assert rows[0] == ["head", "predicts", "top-1", "top-5"]
    assert rows[2:] == [
        ["0", "t+2", "51.2%", "78.9%"],
        ["1", "t+3", "30.0%", "59.0%"],
        ["2", "t+4", "20.0%", "-"],
    ]


def test_rates_and_accuracies_on_new_answers_have_rows():
    new = {"answers": 24, "acceleration_rate": 1.71, "standard_error": 0.05}
    promise = {"answers": 30, "expected_acceleration_rate": 1.83, "expected_standard_error": 0.06}
    report = with_check(native={**NATIVE, "seen_share": 0.25, "new": new})
    report["heads"] = [
        {**head, "new": {"labels": 9, "top1": 0.444, "top5": 0.666}} for head in REPORT["heads"]
    ]
    report["tree"] = {
        **TREE,
        "nodes": 63,
        "expected_acceleration_rate": 2.4,
        "seen_share": 0.2,
        "new": promise,
    }
    card = card_of(report)
    results = {row[0]: row[1] for row in table_under(card, "Results")}
    assert results["answers seen in training"] == "25.0%"
    assert results["acceleration rate on new answers"] == "1.71 ± 0.05"
    assert results["expected on new answers"] == "1.83 ± 0.06"
    rows = table_under(card, "Accuracy of the heads")
    assert [row[-2:] for row in rows[2:]] == [["44.4%", "66.6%"]] * 3 and len(
        {len(row) for row in rows}
    ) == 1
    assert "44.4%" not in card_of() and "new answers |" not in card_of()


def test_tokens_by_depth_are_a_sum():
    tree = {
        **TREE,
        "nodes": 63,
        "expected_acceleration_rate": 2.4,
        "tokens_by_depth": [0.71, 0.4, 0.2],
    }
    assert "by depth, 0.71 + 0.40 + 0.20." in card_of({**REPORT, "tree": tree})


def test_cards_of_backbone_and_heads_state_its_drift():
    report, config = {**REPORT, "train": {"drift": DRIFT}}, run_config("owner/original")
    config = config.model_copy(
        update={"train": config_of(train={"heads": "medusa", "method": "medusa-2"}).train}
    )
    of_original = Published(
        from_json(Report, report),
        config,
        "me/tuned",
        "owner/original",
        tuned=True,
        heads_repo_id="me/heads",
    )
    tuned, heads = (
        backbone_card(of_original),
        card_of(report, config, base_model="me/tuned", tuned=True),
    )
    for card in (tuned, heads):
        for figure in ("0.0123", "2.100", "2.142", "+2.0%", "98.8%", "4,321", "owner/original"):
            assert figure in card
        assert "vllm serve me/heads\n" in card
    assert "| backbone.lora_rank |" in heads and "backbone.lora_rank" not in card_of()
    for card, expected in (
        (tuned, ["owner/original", "finetune"]),
        (heads, ["me/tuned", "adapter"]),
    ):
        data = ModelCard(card).data
        assert [data.base_model, data["base_model_relation"]] == expected
    assert "2.142" not in card_of()


# --- commands


def test_the_recipe_is_the_run_again_without_paths(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "run: {name: secret, seed: 7}\ntarget: {model: owner/target, chat_template: '{{ messages"
        " }}'}\nseeds: {sources: [{path: mine.jsonl, limit: 5}, {hub: owner/chats}]}\ntrain:"
        " {heads: medusa, lr: 1.0e-3, medusa: {lm_head: tied}}\ncheck: {engines: [native]}\n"
    )
    config = load_config(tmp_path / "run.yaml")
    card = card_of({**REPORT, "target_revision": "c0ffee"}, config)
    (tmp_path / "recipe.yaml").write_text(card.split("````yaml\n")[1].split("````")[0])
    again = load_config(tmp_path / "recipe.yaml")
    assert again.seeds.sources[0].path == tmp_path / "PATH_TO_PATH" and "secret" not in card
    for part in ("generate", "features", "train", "calibrate", "check"):
        assert getattr(again, part) == getattr(config, part)
    assert (again.target.revision, again.target.chat_template, again.run.seed) == (
        "c0ffee",
        "{{ messages }}",
        7,
    )
    commands = [shlex.split(row[1].strip("`")) for row in table_under(card, "Reproduce")[2:]]
    assert len(commands) == 3
    for command in commands:
        assert (
            command[:4] == ["medusa-distill", "run", "recipe.yaml", "--until"]
            and command[4] in STAGES
        )
        load_config(tmp_path / "recipe.yaml", command[5:])


@pytest.mark.parametrize(("chosen", "expected"), [({}, 3), ({"num_speculative_tokens": 2}, 2)])
def test_the_vllm_command_can_be_pasted_into_a_shell(chosen, expected):
    card = card_of({**REPORT, "tree": {**REPORT["tree"], **chosen}})
    alone, command = re.findall(r"```bash\n(vllm serve.*?)```", card, re.DOTALL)
    assert shlex.split(alone) == ["vllm", "serve", "me/heads"]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:4] == ["vllm", "serve", "owner/target", "--speculative-config"]
    assert json.loads(words[4]) == {
        "method": "medusa",
        "model": "me/heads",
        "num_speculative_tokens": expected,
    }


@pytest.mark.parametrize(
    ("export", "num_layers", "stated"),
    [
        ("expanded", 1, "text-generation-launcher --model-id me/heads"),
        ("shared", 1, "text-generation-launcher --model-id me/heads"),
        ("shared", 1, "TensorRT-LLM cannot load these heads"),
        ("shared", 2, "TGI cannot load these heads"),
    ],
)
def test_each_format_names_the_engines_that_load_it(export, num_layers, stated):
    train = {"heads": "medusa", "num_heads": 3, "medusa": {"num_layers": num_layers}}
    assert stated in card_of(config=config_of(train=train, export={"formats": [export]}))


# --- what is not known, or private


@pytest.mark.parametrize(
    "report", [{}, {"num_heads": 3}, {key: REPORT[key] for key in REPORT if key != "check"}]
)
def test_before_the_check_no_rate_is_stated(report):
    assert "not been checked yet" in card_of(report) and "2.31" not in card_of(report)


@pytest.mark.parametrize("gone", [*REPORT, "everything"])
def test_whatever_is_missing_leaves_no_hole(gone):
    report = (
        {} if gone == "everything" else {key: value for key, value in REPORT.items() if key != gone}
    )
    card = card_of(report)
    assert not re.search(r"\b(None|nan|Undefined)\b|\{\{|\{%|\n\n\n", card)
    assert ModelCard(card).data.base_model == "owner/target"
    headings = re.findall(r"(?m)^.*\n\n?## ", card)
    assert all(found.endswith("\n\n## ") or found.startswith("#") for found in headings)


@pytest.mark.parametrize("base_model", [SECRET, None])
def test_a_local_target_is_never_named(base_model):
    of_backbone = Published(
        from_json(Report, REPORT),
        config_of(),
        "me/tuned",
        base_model,
        tuned=True,
        heads_repo_id="me/heads",
    )
    for card in (card_of(base_model=base_model), backbone_card(of_backbone)):
        assert not any(private in card for private in ("/home", "secret", "private"))
        assert "a local model" in card.lower() and ModelCard(card).data.base_model is None


def test_a_failed_check_is_stated():
    card = card_of(with_check(passed=False, failures=["vLLM accepted nothing."]))
    assert "**The check failed.** vLLM accepted nothing." in card


@pytest.mark.parametrize(
    ("mode", "stated"),
    [
        ("replay", "fed to the target"),
        ("self-talk", "both sides"),
        ("passthrough", "not the target's"),
    ],
)
def test_the_card_names_who_wrote_the_training_text(mode, stated):
    assert stated in card_of(config=config_of(generate={"mode": mode}))
