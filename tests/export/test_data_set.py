"""The conversations on the Hub: read from it by `datasets`, without names of this machine, never two pushes mixed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import datasets.config
import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard
from pipeline.export.parcel import Push

from pipeline.errors import CheckFailed, ConfigError, DataError
from pipeline.export import hub_data_set
from pipeline.export.hub_data_set import GeneratedShards, push_data_set
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.storage.shards import read_rows
from tests.export.hub_stand_in import HubStandIn, Repository
from tests.export.pushes import PASSED
from tests.flows.tiny import latest

REPORT = PASSED | {"seeds": {"rows": 40, "quarantined": 2}, "generate": {"rows": 40, "tokens": 1234}}
RECIPE = {
    "target": {"model": "owner/target"},
    "seeds": {"sources": [{"path": "/home/me/private.jsonl"}]},
    "generate": {"mode": "replay", "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 16, "holdout_temperature": 0.0},
}


@pytest.fixture
def generated(finished_run) -> GeneratedShards:
    stage = latest(finished_run, "generate")
    return GeneratedShards(stage.shards(), stage.fingerprint)


def push_it(generated: GeneratedShards, **changes) -> dict:
    usual = {"repo_id": "me/chats", "base_model": "owner/target", "report": REPORT, "recipe": RECIPE}
    return push_data_set(generated, Push(**usual | changes), RecurrentHeads)


@pytest.fixture
def load(hub: HubStandIn, monkeypatch, tmp_path):
    """`datasets.load_dataset` of the stand-in, into a cache of this test."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return lambda **settings: load_dataset("me/chats", cache_dir=str(tmp_path / "cache"), **settings)


def rows_of(generated: GeneratedShards) -> list[dict]:
    return [dict(row) for shard in generated.shards for row in read_rows(shard)]


def test_it_is_loaded_from_the_hub_split_by_split_with_every_row_as_it_was_written(generated, hub, load):
    push_it(generated)
    found = load()
    expected = rows_of(generated)
    assert set(found) == {"train", "calibrate", "check"}
    for split, table in found.items():
        assert table.column_names == ["id", "messages", "finish", "input_ids", "spans"]
        for got, row in zip(table, (row for row in expected if row["split"] == split), strict=True):
            assert {name: got[name] for name in ("messages", "finish", "input_ids", "spans")} == {
                name: row[name] for name in ("messages", "finish", "input_ids", "spans")
            }


def test_a_local_file_is_a_number_in_its_rows_ids_and_a_hub_data_set_its_name(generated, hub, load):
    own = {row["id"].rpartition(":")[0] for row in rows_of(generated)}
    assert own == {"seeds"}
    for source, public in (({"path": "/x/seeds.jsonl"}, "local-1"), ({"hub": "owner/seeds"}, "owner/seeds")):
        push_it(generated, recipe=RECIPE | {"seeds": {"sources": [source]}})
        names = {
            id.rpartition(":")[0]
            for id in load(split="train", revision=hub.repositories["datasets/me/chats"].sha)["id"]
        }
        assert names == {public}


def test_its_card_says_where_it_is_from_and_under_which_terms(generated, hub):
    push_it(generated)
    card = DatasetCard(hub.repositories["datasets/me/chats"].files["README.md"].decode())
    assert (card.data.license, card.data.size_categories) == ("other", ["n<1K"])
    assert {file["split"] for file in card.data.configs[0]["data_files"]} == {"train", "calibrate", "check"}
    for said in (
        "owner/target",
        "wrote every answer itself",
        "1 local source(s)",
        "40 seeds were kept and 2 refused",
        "terms of the seeds",
        'load_dataset("me/chats"',
        "medusa-distill run recipe.yaml --until generate",
    ):
        assert said in card.text, said
    assert "private" not in card.content and "/home" not in card.content and "{{" not in card.content


def test_a_second_push_replaces_the_first_and_an_equal_one_makes_no_commit(generated, hub, load, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(hub_data_set, "ROWS_PER_FILE", 10)
        push_it(generated)
    repository = hub.repositories["datasets/me/chats"]
    before = [name for name in repository.files if name.startswith("data/train-")]
    assert len(before) > 1
    second = push_it(generated)
    assert [name for name in repository.files if name.startswith("data/train-")] == ["data/train-00000.parquet"]
    assert len(load(split="train")) == sum(row["split"] == "train" for row in rows_of(generated))
    commits = len(repository.commits)
    again = push_it(generated)
    assert again["unchanged"] and again["commit"] == second["commit"] and len(repository.commits) == commits


@pytest.mark.parametrize("theirs", ["train.jsonl", "data/train-00000-of-00002.parquet", "model.safetensors"])
def test_another_data_set_is_never_written_over(generated, hub, theirs):
    hub.repositories["datasets/me/chats"] = Repository(private=False, commits=[{theirs: b"theirs"}])
    with pytest.raises(ConfigError, match="holds something else"):
        push_it(generated)
    assert hub.repositories["datasets/me/chats"].commits == [{theirs: b"theirs"}]


def test_nothing_goes_without_a_passed_check_or_in_a_dry_run(generated, hub, tmp_path):
    with pytest.raises(CheckFailed):
        push_it(generated, report=None)
    dry = push_it(generated, dry_run=True)
    assert hub.requests == [] and dry["missing"] == []
    assert dry["files"] == push_it(generated)["files"]
    assert not list(Path(generated.shards[0]).parent.parent.glob(".data-set-*"))


def test_shards_of_another_run_are_not_published(generated, hub):
    with pytest.raises(DataError, match="another run"):
        push_it(replace(generated, fingerprint="0" * 64))
    assert hub.requests == []
