"""The conversations on the Hub: read from it by `datasets`, without names of this machine, never
two pushes mixed.
"""

from __future__ import annotations

import datasets.config
import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard

from pipeline.errors import ConfigError, DataError
from pipeline.export.data_set import data_set_upload
from pipeline.storage.shards import read_rows
from pipeline.storage.stage_directory import StageDirectory
from tests.export.hub_stand_in import HubStandIn, Repository
from tests.export.pushes import PASSED, conversations_of, published, run_config, send
from tests.flows.tiny import latest

REPORT = PASSED | {
    "seeds": {"rows": 40, "quarantined": 2},
    "generate": {"rows": 40, "tokens": 1234},
}
LOCAL = run_config(source={"path": "/home/me/private/seeds.jsonl"})
PLACE = "datasets/me/pushed"


@pytest.fixture
def generated(finished_run) -> StageDirectory:
    return latest(finished_run, "generate")


@pytest.fixture
def push_it(generated, tmp_path):
    """Push the conversations."""

    def push(config=LOCAL) -> dict:
        return send(conversations_of(generated, tmp_path, report=REPORT, config=config))

    return push


@pytest.fixture
def load(hub: HubStandIn, monkeypatch, tmp_path):
    """`datasets.load_dataset` of the stand-in, into a cache of this test."""
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return lambda: load_dataset("me/pushed", cache_dir=str(tmp_path / "cache"))


def rows_of(generated: StageDirectory, split: str) -> list[dict]:
    rows = [dict(row) for shard in generated.shards() for row in read_rows(shard)]
    return [row for row in rows if row["split"] == split]


@pytest.mark.parametrize(
    ("source", "public"),
    [({"path": "/x/seeds.jsonl"}, "local-1"), ({"hub": "owner/seeds"}, "owner/seeds")],
)
def test_every_row_is_loaded_from_the_hub_as_written(generated, push_it, load, source, public):
    """But for its id, in which a local file is a number."""
    push_it(run_config(source=source))
    found = load()
    assert set(found) == {"train", "calibrate", "check"}
    for split, table in found.items():
        for got, row in zip(table, rows_of(generated, split), strict=True):
            name, _, number = row["id"].rpartition(":")
            assert name == "seeds" and got == {
                "id": f"{public}:{number}",
                "messages": row["messages"],
                "finish": row["finish"],
                "input_ids": row["input_ids"],
                "spans": row["spans"],
            }


def test_its_card_names_source_terms_and_no_local_file(hub, push_it):
    push_it()
    card = DatasetCard(hub.repositories[PLACE].files["README.md"].decode())
    splits = [file["split"] for file in card.data.configs[0]["data_files"]]
    assert card.data.license == "other" and splits == ["train", "calibrate", "check"]
    figures = ("owner/target", "1 local source(s)", "40 seeds", "1,234 tokens", '"me/pushed"')
    assert all(figure in card.text for figure in figures)
    assert not any(private in card.content for private in ("private", "/home", "{{"))


def test_a_push_replaces_all_files_of_an_earlier_one(hub, push_it):
    earlier = {"data/train-00000.parquet": b"old", "data/train-00001.parquet": b"old"}
    hub.repositories[PLACE] = Repository(private=False, commits=[earlier])
    push_it()
    names = {f"data/{split}-00000.parquet" for split in ("train", "calibrate", "check")}
    assert hub.repositories[PLACE].files.keys() == names | {"README.md"}


@pytest.mark.parametrize("theirs", ["data/train-00000-of-00002.parquet", "model.safetensors"])
def test_another_data_set_is_never_written_over(hub, push_it, theirs):
    hub.repositories[PLACE] = Repository(private=False, commits=[{theirs: b"theirs"}])
    with pytest.raises(ConfigError):
        push_it()
    assert hub.repositories[PLACE].commits == [{theirs: b"theirs"}]


def test_shards_of_another_run_are_refused(generated, tmp_path):
    with pytest.raises(DataError):
        data_set_upload(generated.shards(), "0" * 64, published(report=REPORT), tmp_path)
