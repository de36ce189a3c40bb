"""The conversations on the Hub: read from it by `datasets`, without names of this machine, never
two pushes mixed.
"""

from __future__ import annotations

import pytest
from datasets import load_dataset
from huggingface_hub import DatasetCard

from pipeline.errors import ConfigError
from pipeline.storage.shards import read_rows
from tests.export.hub_stand_in import Repository
from tests.export.pushes import PASSED, conversations_of, run_config, send
from tests.flows.tiny import latest

REPORT = PASSED | {
    "seeds": {"rows": 40, "quarantined": 2},
    "generate": {"rows": 40, "tokens": 1234},
}
LOCAL = run_config(source={"path": "/home/me/private/seeds.jsonl"})
PLACE = "datasets/me/pushed"


@pytest.fixture
def generated(finished_run):
    return latest(finished_run, "generate")


@pytest.fixture
def push_it(generated, tmp_path):
    """Push the conversations."""

    def push(config=LOCAL):
        return send(conversations_of(generated, tmp_path, report=REPORT, config=config))

    return push


def rows_of(generated, split):
    rows = [dict(row) for shard in generated.shards() for row in read_rows(shard)]
    return [row for row in rows if row["split"] == split]


@pytest.mark.parametrize(
    ("source", "public"),
    [({"path": "/x/seeds.jsonl"}, "local-1"), ({"hub": "owner/seeds"}, "owner/seeds")],
)
def test_every_row_is_loaded_as_written(tmp_path, hub, generated, push_it, source, public):
    """But for its id, in which a local file is a number."""
    push_it(run_config(source=source))
    place = tmp_path / "downloaded"
    for name, content in hub.repositories[PLACE].files.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    found = load_dataset(str(place), cache_dir=str(tmp_path / "cache"))
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
    assert all(figure in card.text for figure in ("owner/target", "40", "1,234", '"me/pushed"'))
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
