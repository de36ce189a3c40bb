"""The model card: read by the Hub, by a shell, and by a person before and after the check."""

from __future__ import annotations

import json
import re
import shlex

import pytest
import yaml
from huggingface_hub import ModelCard
from pipeline.export.card_metadata import Licence, licence_of

from pipeline.config.load import load_config
from pipeline.export.card import model_card
from pipeline.export.card_facts import fingerprints
from pipeline.flow import STAGES
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from tests.export.hub_stand_in import Repository

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


def test_fingerprints_stand_in_the_order_of_the_stages_and_none_is_of_a_cache():
    found = {"train": "1", "features": "2", "tuned-features": "3", "seeds": "4", "check": "5"}
    told = fingerprints({"run": {"fingerprints": found}})
    assert list(told.items()) == [("seeds", "4"), ("train", "1"), ("check", "5")]


def test_the_front_matter_is_what_the_hub_reads():
    licence = Licence("other", "their-terms", "https://example.org/terms")
    data = ModelCard(card_of(licence=licence, data_set="me/written")).data
    assert (data.base_model, data["base_model_relation"], data.pipeline_tag) == (
        "owner/target",
        "adapter",
        "text-generation",
    )
    assert data.datasets == ["me/written", "owner/chats"] and data.library_name == "vllm"
    assert {"medusa", "speculative-decoding", "vllm", "speculators"} <= set(data.tags)
    assert (data.license, data.license_name, data.license_link) == ("other", "their-terms", "https://example.org/terms")


def test_recurrent_heads_are_found_as_eagle_and_heads_that_vllm_does_not_serve_not_as_vllm_s():
    ours = {"base_model": "owner/target", "repo_id": "me/heads", "recipe": RECIPE}
    served = ModelCard(model_card(REPORT, kind=RecurrentHeads, **ours)).data
    assert {"eagle", "recurrent", "vllm"} <= set(served.tags)
    alone = ModelCard(model_card(REPORT | {"export": {"vllm": False}}, kind=RecurrentHeads, **ours)).data
    assert not {"vllm", "speculators"} & set(alone.tags) and alone.library_name == "medusa-distill"


@pytest.mark.parametrize("link", ["LICENSE", "https://example.org/terms", None])
def test_the_licence_is_what_the_target_s_own_card_states(link, tmp_path, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    keys = {"license": "other", "license_name": "theirs", **({"license_link": link} if link else {})}
    card = f"---\n{yaml.safe_dump(keys)}---\n# A model\n"
    (tmp_path / "README.md").write_text(card)
    hub.repositories["owner/target"] = Repository(private=False, commits=[{"README.md": card.encode()}])
    assert licence_of("owner/target", None, online=False) is None and hub.requests == []
    found = licence_of("owner/target", None, online=True)
    at_the_hub = "https://huggingface.co/owner/target/blob/main/LICENSE" if link == "LICENSE" else link
    assert found == Licence("other", "theirs", at_the_hub) == licence_of("owner/target", None, online=False)
    assert licence_of(str(tmp_path), None, online=False) == Licence(
        "other", "theirs", link if link != "LICENSE" else None
    )


def test_the_licence_is_that_of_the_commit_that_was_read(tmp_path, hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    first, second = (
        f"---\nlicense: other\nlicense_name: {name}\nlicense_link: LICENSE\n---\n# A model\n".encode()
        for name in ("first", "second")
    )
    repository = Repository(private=False, commits=[{"README.md": first}, {"README.md": second}])
    hub.repositories["owner/target"] = repository
    commit = repository.shas[0]
    expected = Licence("other", "first", f"https://huggingface.co/owner/target/blob/{commit}/LICENSE")
    for online in (True, False):
        assert licence_of("owner/target", commit, online=online) == expected


@pytest.mark.parametrize("card", [None, "no front matter", "---\nlicense: [mit, apache-2.0]\n---\n", "---\n: [\n---\n"])
def test_a_target_without_a_readable_licence_declares_none(card, tmp_path):
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert licence_of(str(tmp_path), None, online=False) is None
    assert ModelCard(card_of()).data.license is None and "No licence is declared" in card_of()


def test_answers_that_are_their_reference_are_counted_by_category():
    rows = [
        {"category": "math", "answers": 12, "plain": 0.25, "medusa": 0.25},
        {"category": "a_b\n<i>", "answers": 8, "plain": 0.5},
    ]
    card = card_of(REPORT | {"check": REPORT["check"] | {"exact_match": rows}})
    *_, head, rule, math, odd = table_under(card, "Results")
    assert (head, set(rule)) == (["category", "answers", "plain", "medusa"], {"---"})
    assert (math, odd) == (["math", "12", "25.0%", "25.0%"], ["a\\_b \\<i\\>", "8", "50.0%", "-"])
    assert "their question's reference" in card and "their question's reference" not in card_of()


def test_rates_stand_beside_what_was_predicted_with_errors_by_category_and_by_draft_length():
    categories = [
        {"category": "chats", "prompts": 12, "acceleration_rate": 2.5, "speedup": 2.0},
        {"category": "private", "prompts": 20, "acceleration_rate": 2.1, "speedup": 1.75},
    ]
    chain = [
        {"draft_tokens": n, "expected_acceleration_rate": 1 + n / 2, "expected_standard_error": n / 50}
        for n in (1, 2, 3)
    ]
    vllm = {"standard_error": 0.04, "num_speculative_tokens": 2, "accepted_per_position": [0.7, 0.5],
            "expected_acceleration_rate": 2.0, "expected_standard_error": 0.1}  # fmt: skip
    check = REPORT["check"] | {
        "native": REPORT["check"]["native"] | {"standard_error": 0.05, "categories": categories},
        "vllm": REPORT["check"]["vllm"] | vllm,
    }
    card = card_of(REPORT | {"check": check, "tree": REPORT["tree"] | {"chain": chain, "expected_standard_error": 0.2}})
    rows = table_under(card, "Results")
    assert ["acceleration rate (tokens per target forward)", "2.31 ± 0.05", "1.80 ± 0.04"] in rows
    assert ["predicted on held-out text", "2.40 ± 0.20", "2.00 ± 0.10"] in rows
    assert ["owner/chats", "12", "2.50", "2.00"] in rows and ["local-2", "20", "2.10", "1.75"] in rows
    assert [row for row in rows if row[0].isdigit()] == [
        ["1", "1.50 ± 0.02", "-", "70%"],
        ["2", "2.00 ± 0.04", "1.80 ± 0.04", "50%"],
        ["3", "2.50 ± 0.06", "-", "-"],
    ]


def test_the_recipe_in_the_card_is_the_run_again_without_paths_and_with_a_command_for_each_figure(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "run: {name: secret, seed: 7}\ntarget: {model: owner/target, chat_template: '{{ messages }}'}\n"
        "seeds: {sources: [{path: mine.jsonl, limit: 5}, {hub: owner/chats}]}\n"
        "train: {heads: medusa, lr: 1.0e-3, medusa: {lm_head: tied}}\ncheck: {engines: [native]}\n"
    )
    config = load_config(tmp_path / "run.yaml")
    card = card_of(REPORT | {"target_revision": "c0ffee"}, config.model_dump(mode="json"))
    (tmp_path / "recipe.yaml").write_text(card.split("````yaml\n")[1].split("````")[0])
    again = load_config(tmp_path / "recipe.yaml")
    assert again.seeds.sources[0].path == tmp_path / "PATH_TO_PATH" and "secret" not in card
    assert again.target.revision == "c0ffee"
    for part in ("generate", "features", "train", "calibrate", "check"):
        assert getattr(again, part) == getattr(config, part)
    assert again.target.chat_template == "{{ messages }}" and again.run.seed == 7
    commands = [row[1].strip("`") for row in table_under(card, "Reproduce")[2:]]
    assert [shlex.split(command)[:3] for command in commands] == [["medusa-distill", "run", "recipe.yaml"]] * 3
    for command in commands:
        words = shlex.split(command)
        assert words[3] == "--until" and words[4] in STAGES
        load_config(tmp_path / "recipe.yaml", words[5:])


def test_the_vllm_command_can_be_pasted_into_a_shell():
    alone, command = re.findall(r"```bash\n(vllm serve.*?)```", card_of(), re.DOTALL)
    assert shlex.split(alone) == ["vllm", "serve", "me/heads"]
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:4] == ["vllm", "serve", "owner/target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "medusa", "model": "me/heads", "num_speculative_tokens": 3}


def test_the_vllm_command_drafts_as_many_tokens_as_were_chosen():
    card = card_of(REPORT | {"tree": REPORT["tree"] | {"num_speculative_tokens": 2}})
    assert re.findall(r'"num_speculative_tokens": (\d+)', card) == ["2"]


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


def test_a_speedup_that_other_load_made_is_not_in_the_card():
    native = REPORT["check"]["native"] | {"overhead": 0.9, "speedup": 2.5}
    assert "left out" not in card_of()
    card = card_of(REPORT | {"check": REPORT["check"] | {"native": native}})
    rows = {row[0].split(" (")[0]: row[1:] for row in table_under(card, "Results")}
    assert "overhead" not in rows and rows.get("speedup", ["-"])[0] == "-" and "are left out" in card


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


def test_the_card_has_rates_and_accuracies_on_new_answers():
    new = {"answers": 24, "acceleration_rate": 1.71, "standard_error": 0.05}
    promise = {"answers": 30, "expected_acceleration_rate": 1.83, "expected_standard_error": 0.06}
    native = REPORT["check"]["native"] | {"seen_share": 0.25, "new": new}
    heads = [head | {"new": {"top1": 0.444, "top5": 0.666}} for head in REPORT["heads"]]
    report = REPORT | {
        "heads": heads,
        "tree": REPORT["tree"] | {"seen_share": 0.2, "new": promise},
        "check": REPORT["check"] | {"native": native},
    }
    text = card_of(report)
    assert "1.71 ± 0.05" in text and "1.83 ± 0.06" in text
    rows = table_under(text, "Accuracy of the heads")
    assert [row[-2:] for row in rows[2:]] == [["44.4%", "66.6%"]] * len(heads)
    assert len({len(row) for row in rows}) == 1
    assert "44.4%" not in card_of() and "new |" not in card_of()
