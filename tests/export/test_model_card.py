"""The model cards: read by the Hub, by a shell, and by a person before and after the check."""

from __future__ import annotations

import json
import re
import shlex

import pytest
from huggingface_hub import ModelCard

from pipeline.artifacts.json_form import from_json
from pipeline.config.load import load_config, validate
from pipeline.export.card import Licence, Published, backbone_card, licence_of, model_card
from pipeline.report.report import Report
from tests.export.hub_stand_in import Repository
from tests.export.pushes import run_config
from tests.report import conftest as report_of_a_run

SECRET = "/home/me/models/secret"
REPORT = report_of_a_run.REPORT | {"target": SECRET, "num_heads": 3}
NATIVE, VLLM = REPORT["check"]["native"], REPORT["check"]["vllm"]


def config_of(**sections):
    usual = {
        "run": {"name": "secret-name"},
        "target": {"model": SECRET},
        "seeds": {"sources": [{"hub": "owner/chats"}, {"path": "/home/me/private.jsonl"}]},
        "train": {"heads": "medusa", "num_heads": 3},
    }
    return validate({**usual, **sections}, "test")


def card_of(report=REPORT, config=None, **changes):
    usual = {"base_model": "owner/target", "repo_id": "me/heads"}
    report = from_json(Report, report)
    return model_card(Published(report, config or config_of(), **usual | changes))


def with_check(**engines):
    return {**REPORT, "check": {**REPORT["check"], **engines}}


def table_under(card, heading):
    section = card.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line[:1] == "|"
    ]


# --- what the Hub reads


def test_the_front_matter_names_model_data_and_licence():
    licence = Licence("other", "their-terms", "https://example.org/terms")
    data = ModelCard(card_of(licence=licence)).data
    assert (data.base_model, data["base_model_relation"]) == ("owner/target", "adapter")
    assert (data.pipeline_tag, data.library_name) == ("text-generation", "vllm")
    assert data.datasets == ["owner/chats"]
    assert {"medusa", "speculative-decoding", "vllm", "speculators"} <= set(data.tags)
    assert Licence(data.license, data.license_name, data.license_link) == licence


@pytest.mark.parametrize("served", [True, False])
def test_tags_name_vllm_only_where_it_serves_the_heads(served):
    card = card_of({**REPORT, "export": {"vllm": served}}, config_of(train={"heads": "recurrent"}))
    data = ModelCard(card).data
    assert {"eagle", "recurrent"} <= set(data.tags)
    assert ("vllm" in data.tags) is ("vllm serve" in card) is served
    assert data.library_name == ("vllm" if served else "medusa-distill")


def test_the_licence_is_that_of_the_target_s_commit(tmp_path, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    link, cards = "https://example.org/terms", []
    for name in ("first", "second"):
        matter = f"license: other\nlicense_name: {name}\nlicense_link: {link}"
        cards.append({"README.md": f"---\n{matter}\n---\n# A model\n".encode()})
    repository = Repository(private=False, commits=cards)
    hub.repositories["owner/target"] = repository
    (tmp_path / "README.md").write_bytes(cards[0]["README.md"])
    expected = Licence("other", "first", link)
    assert licence_of("owner/target", repository.shas[0], online=True) == expected
    assert licence_of("owner/target", repository.shas[0], online=False) == expected
    assert licence_of(str(tmp_path), None, online=False) == expected


@pytest.mark.parametrize("card", ["no matter", "---\nlicense: [mit]\n---\n", "---\n: [\n---\n"])
def test_a_target_without_a_readable_licence_declares_none(card, tmp_path):
    assert licence_of(str(tmp_path), None, online=False) is None
    (tmp_path / "README.md").write_text(card)
    assert licence_of(str(tmp_path), None, online=False) is None


# --- figures


def test_categories_have_public_names():
    measured = {"prompts": 12, "acceleration_rate": 2.5, "speedup": 2.0}
    categories = [measured | {"category": name} for name in ("chats", "private")]
    rows = table_under(card_of(with_check(native={**NATIVE, "categories": categories})), "Results")
    assert ["tokens per step", "owner/chats", "local-2"] in rows
    assert ["heads", "2.50 (2.00x)", "2.50 (2.00x)"] in rows


def test_cards_of_backbone_and_heads_state_its_drift():
    config = run_config("owner/original", train={"heads": "medusa", "method": "medusa-2"})
    ids = {"repo_id": "me/tuned", "base_model": "owner/original", "heads_repo_id": "me/heads"}
    tuned = backbone_card(Published(from_json(Report, REPORT), config, tuned=True, **ids))
    heads = card_of(config=config, base_model="me/tuned", tuned=True)
    for card in (tuned, heads):
        for figure in ("0.0123", "3.210", "3.250", "+1.2%", "96.3%", "5,545", "owner/original"):
            assert figure in card
    data = ModelCard(tuned).data
    assert (data.base_model, data["base_model_relation"]) == ("owner/original", "finetune")
    assert ModelCard(heads).data.base_model == "me/tuned"
    assert "0.0123" not in card_of()
    unchanged = "the model itself is unchanged."
    assert unchanged in card_of() and unchanged not in heads


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
    assert (again.target.revision, again.run.seed) == ("c0ffee", 7)
    assert again.target.chat_template == "{{ messages }}"
    for row in table_under(card, "Reproduce")[2:]:
        *words, stage = shlex.split(row[1].strip("`"))[:5]
        assert words == ["medusa-distill", "run", "recipe.yaml", "--until"]
        assert stage in ("generate", "calibrate", "check")


def test_the_vllm_command_can_be_pasted_into_a_shell():
    card = card_of({**REPORT, "tree": {**REPORT["tree"], "num_speculative_tokens": 2}})
    alone, command = re.findall(r"```bash\n(vllm serve.*?)```", card, re.DOTALL)
    assert shlex.split(alone) == ["vllm", "serve", "me/heads"]
    *words, settings = shlex.split(command.replace("\\\n", " "))[:5]
    assert words == ["vllm", "serve", "owner/target", "--speculative-config"]
    expected = {"method": "medusa", "model": "me/heads", "num_speculative_tokens": 2}
    assert json.loads(settings) == expected


@pytest.mark.parametrize("num_layers", [1, 2])
def test_tgi_is_started_only_with_heads_of_one_block(num_layers):
    train = {"heads": "medusa", "num_heads": 3, "medusa": {"num_layers": num_layers}}
    card = card_of(config=config_of(train=train, export={"formats": ["shared"]}))
    assert ("text-generation-launcher --model-id me/heads" in card) is (num_layers == 1)


# --- what is not known, or private


@pytest.mark.parametrize("gone", [*REPORT, "everything"])
def test_whatever_is_missing_leaves_no_hole(gone):
    left = REPORT.keys() - {gone} if gone != "everything" else ()
    card = card_of({key: REPORT[key] for key in left})
    assert not re.search(r"\b(None|nan|Undefined)\b|\{\{|\{%|\n\n\n", card)
    assert ModelCard(card).data.base_model == "owner/target"


@pytest.mark.parametrize("base_model", [SECRET, None])
def test_a_local_target_is_never_named(base_model):
    report = from_json(Report, REPORT)
    of_backbone = Published(report, config_of(), "me/tuned", base_model, tuned=True)
    for card in (card_of(base_model=base_model), backbone_card(of_backbone)):
        assert not any(private in card for private in ("/home", "secret", "private"))
        assert "a local model" in card.lower() and ModelCard(card).data.base_model is None
