"""A driver killed at any write of a commit loses nothing, and the same command resumes."""

from __future__ import annotations

import signal

import pytest

from tests.faults.processes import run_until_killed
from tests.faults.unfinished import assert_as_uninterrupted, cut_before, files_of, write_config
from tests.flows.tiny import SHARDED, latest, run_again, shards_made, stages_run

pytestmark = [pytest.mark.fault, pytest.mark.slow]

DEATHS = [  # the moment, the file, and the shards that are committed by then
    ("open", "shards/00000.parquet", []),
    ("write", "shards/00001.parquet", [0]),
    ("rename", "quarantine/00002.jsonl", [0, 1]),
    ("rename", "shards/00002.parquet", [0, 1]),
    ("renamed", "shards/00003.parquet", [0, 1, 2, 3]),  # before its note
    ("rename", "DONE.json", [0, 1, 2, 3]),
]
JOINT = {
    "train__method": "medusa-2",
    "train__backbone__sequence_length": 96,
    "train__backbone__batch_sequences": 4,
    "train__backbone__lora_rank": 4,
}
DEATHS_IN_MERGE = [  # the moment, the file, and whether the backbone is there by then
    ("renamed", "heads.safetensors", False),
    ("rename", "backbone", False),
    ("renamed", "backbone", True),
]


@pytest.mark.parametrize("name", SHARDED)
def test_a_killed_driver_loses_nothing_and_makes_nothing_twice(
    finished_run, copied_run, make_settings, make_config, tmp_path, name
):
    run = cut_before(copied_run, name)
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path))
    whole, before = files_of(latest(finished_run, name)), set()
    for moment, file, committed in DEATHS:
        assert run_until_killed(config, moment, f"{name}-*/{file}") == -signal.SIGKILL
        stage = latest(run, name)
        found = sorted(stage.receipts())
        assert found == committed and stage.done is None
        for index in found:
            assert stage.shard_path(index).read_bytes() == whole[f"shards/{index:05d}.parquet"]
        if moment == "write":
            (temporary,) = stage.path.glob("shards/*00001*.tmp")
            assert temporary.stat().st_size > 100, "half is there"
        assert name == "seeds" or not before & set(shards_made(run))
        before |= {(name, index) for index in found}
    run = run_again(make_config(tmp_path))
    assert stages_run(run)[0] == name and (name == "seeds" or shards_made(run)[:1] != [(name, 0)])
    assert_as_uninterrupted(run, finished_run)
    assert latest(run, name).content == latest(finished_run, name).content
    heads = [latest(of, "train").path / "heads.safetensors" for of in (run, finished_run)]
    assert heads[0].read_bytes() == heads[1].read_bytes()
    assert stages_run(run_again(make_config(tmp_path))) == []


def test_a_killed_merge_is_done_again_from_the_same_adapter(make_settings, make_config, tmp_path):
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path, **JOINT))
    reference = run_again(make_config(tmp_path, run__name="reference", **JOINT), until="train")
    run = run_again(make_config(tmp_path, **JOINT), until="generate")
    for moment, file, whole in DEATHS_IN_MERGE:
        assert run_until_killed(config, moment, file) == -signal.SIGKILL
        stage = latest(run, "train")
        assert stage.done is None and (stage.path / "backbone").is_dir() == whole
    trained = (stage.path / "heads.safetensors").stat().st_mtime_ns
    run = run_again(make_config(tmp_path, **JOINT), until="train")
    ours, theirs = (latest(of, "train").path for of in (run, reference))
    assert (ours / "heads.safetensors").stat().st_mtime_ns == trained
    assert {path.name for path in ours.iterdir()} == {path.name for path in theirs.iterdir()}
    for path in (theirs / "backbone").iterdir():
        assert (ours / "backbone" / path.name).read_bytes() == path.read_bytes()
    assert latest(run, "train").verify() == []
