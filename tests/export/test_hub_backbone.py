"""A tuned backbone on the Hub: what goes, where it may go, and what its cards say of how far it has moved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from pipeline.errors import CheckFailed, ConfigError, DataError
from pipeline.export.card import backbone_card, model_card
from pipeline.export.hub import prepare_backbone
from pipeline.export.parcel import Push
from pipeline.heads.medusa import MedusaHeads
from tests.export.hub_stand_in import HubStandIn, Repository
from tests.export.pushes import PASSED, export_to, push, sums

DRIFT = {
    "kl": 0.01234,
    "perplexity": {"original": 2.1, "tuned": 2.142},
    "perplexity_change": 0.02,
    "greedy_agreement": 0.9876,
    "positions": 4321,
}
REPORT = PASSED | {"train": {"drift": DRIFT}}
SAID = ("0.0123", "2.100 → 2.142", "+2.00%", "98.76%", "4,321")
RECIPE = {
    "train": {"method": "medusa-2", "backbone": {"recipe": "joint", "lora_rank": 32}},
    "target": {"model": "owner/original"},
}


@pytest.fixture
def backbone(tmp_path) -> Path:
    directory = tmp_path / "backbone"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"first")
    (directory / "model-00002-of-00002.safetensors").write_bytes(b"second")
    (directory / "backbone.json").write_text("{}")
    return directory


def push_it(backbone: Path, hub: HubStandIn, **changes) -> dict:
    usual = {"repo_id": "me/tuned", "base_model": "owner/original", "report": REPORT, "recipe": RECIPE}
    push = Push(**usual | changes)
    prepared = prepare_backbone(backbone, push, sums(backbone), heads_repo_id="me/tuned-medusa", kind=MedusaHeads)
    return prepared.send()


def test_all_of_it_goes_in_one_commit_and_not_again(backbone, hub):
    first = push_it(backbone, hub)
    repository = hub.repositories["me/tuned"]
    assert repository.files.keys() == {path.name for path in backbone.iterdir()} | {"README.md"}
    assert first["commit"] == repository.sha and len(repository.commits) == 2
    again, sent = push_it(backbone, hub), hub.bytes_uploaded
    assert again["unchanged"] and len(repository.commits) == 2 and sent == len(b"first" + b"second")


def test_a_dry_run_touches_nothing(backbone, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    dry = push_it(backbone, hub, dry_run=True)
    assert {file["path"] for file in dry["files"]} == {path.name for path in backbone.iterdir()} | {"README.md"}
    assert dry["commit"] is None and hub.requests == []


@pytest.mark.parametrize(
    "names", [["model.safetensors", "config.json"], ["config.json"], ["medusa_lm_head.safetensors", "config.json"]]
)
def test_another_model_is_never_written_over(backbone, hub, names):
    hub.repositories["me/tuned"] = Repository(private=False, commits=[dict.fromkeys(names, b"theirs")])
    with pytest.raises(ConfigError, match="holds something else"):
        push_it(backbone, hub)
    assert hub.repositories["me/tuned"].commits == [dict.fromkeys(names, b"theirs")]


@pytest.mark.parametrize("said", ["the backbone's own", "the target's"])
def test_a_file_that_names_a_path_of_this_machine_is_not_pushed(backbone, hub, tmp_path, said):
    path = str(backbone if said == "the backbone's own" else tmp_path / "target")
    (backbone / "tokenizer_config.json").write_text(json.dumps({"name_or_path": path}))
    with pytest.raises(DataError, match=r"tokenizer_config\.json names the target's local path"):
        push_it(backbone, hub, recipe={"target": {"model": str(tmp_path / "target")}})
    assert hub.requests == []


def test_without_a_passed_check_or_whole_it_stays_at_home(backbone, hub):
    with pytest.raises(CheckFailed):
        push_it(backbone, hub, report=None)
    (backbone / "config.json").unlink()
    with pytest.raises(DataError, match=r"lacks config\.json"):
        push_it(backbone, hub)
    assert hub.requests == []


def test_heads_are_pushed_without_the_backbone_that_lies_beside_them(tmp_path, backbone, hub):
    export = export_to(tmp_path / "export", base_model=str(tmp_path / "export" / "backbone"))
    backbone.rename(export / "backbone")
    push(export, hub, report=REPORT, recipe=RECIPE, base_model="me/tuned")
    files = hub.repositories["me/heads"].files
    assert not [name for name in files if "backbone" in name or "model-0" in name]
    config = json.loads(files["config.json"])
    assert config["base_model_name_or_path"] == "me/tuned"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "me/tuned",
        "architectures": ["LlamaForCausalLM"],
    }


def test_both_cards_say_that_it_has_changed_and_by_how_much():
    ours = {"repo_id": "me/tuned", "heads_repo_id": "me/tuned-medusa"}
    tuned = backbone_card(REPORT, kind=MedusaHeads, base_model="owner/original", recipe=RECIPE, **ours)
    heads = model_card(
        REPORT, kind=MedusaHeads, base_model="me/tuned", repo_id="me/tuned-medusa", recipe=RECIPE, tuned=True
    )
    for card in (tuned, heads):
        assert all(figure in card for figure in SAID) and "owner/original" in card
        assert "vllm serve me/tuned-medusa\n" in card
    assert "backbone has changed" in heads and "| backbone.lora_rank | 32 |" in heads
    of_tuned, of_heads = ModelCard(tuned).data, ModelCard(heads).data
    assert (of_tuned.base_model, of_tuned["base_model_relation"]) == ("owner/original", "finetune")
    assert (of_heads.base_model, of_heads["base_model_relation"]) == ("me/tuned", "adapter")


def test_heads_on_a_frozen_backbone_have_no_changed_backbone():
    card = model_card(PASSED, kind=MedusaHeads, base_model="owner/t", repo_id="me/h", recipe=RECIPE)
    assert "has changed" not in card and "lora" not in card


def test_a_local_original_is_not_named():
    ours = {"repo_id": "me/tuned", "heads_repo_id": "me/tuned-medusa"}
    recipe = RECIPE | {"target": {"model": "/home/me/secret"}}
    cards = [
        backbone_card(REPORT, kind=MedusaHeads, base_model="/home/me/secret", recipe=recipe, **ours),
        model_card(REPORT, kind=MedusaHeads, base_model=None, repo_id=None, recipe=recipe, tuned=True),
    ]
    assert all("secret" not in card for card in cards)
    assert "exported beside them in `backbone/`" in cards[1] and "A local model" in cards[0]
