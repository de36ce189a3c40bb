"""Damage is found, named and repaired, and nothing whole is made twice."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from pipeline.errors import DataError, EnvironmentFault
from pipeline.run import context as run_context
from pipeline.stages import features, generate, seeds
from pipeline.storage.receipts import read_receipt
from tests.flows.tiny import (
    SHARDED,
    STAGES,
    contents,
    last_events,
    latest,
    run_again,
    save_seeds,
    shards_made,
    stages_run,
)

pytestmark = pytest.mark.slow


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    """Flip a bit of a shard's largest column, or the last byte of another file."""
    place = -1
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as shard:
            group = shard.metadata.row_group(0)
        columns = [group.column(index) for index in range(group.num_columns)]
        column = max(columns, key=lambda column: column.total_compressed_size)
        place = column.data_page_offset + column.total_compressed_size // 2
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)


def rot(path: Path) -> None:
    """Flip a bit as a bad disk does: the file's time stays."""
    stat = path.stat()
    flip(path)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


SHARD, QUARANTINE = "shards/00002.parquet", "quarantine/00002.jsonl"
DAMAGES: list[tuple[str, str, Callable[[Path], object]]] = [
    ("seeds", SHARD, Path.unlink),
    ("generate", SHARD, truncate),
    ("generate", QUARANTINE, Path.unlink),
    ("features", SHARD, flip),
    ("train", "heads.safetensors", flip),
    ("calibrate", "tree.json", flip),
    ("check", "answers/plain.jsonl", Path.unlink),
]


@pytest.mark.parametrize(("name", "file", "damage"), DAMAGES)
def test_damage_is_named_by_verify_and_repaired_alone_by_run(copied_run, again, name, file, damage):
    before, stage = contents(copied_run, *SHARDED), latest(copied_run, name)
    whole = (stage.path / file).read_bytes()
    damage(stage.path / file)
    (problem,) = stage.verify()
    assert problem.startswith(f"{stage.path / file} is ")
    run = again()
    assert stages_run(run) == [name] and contents(run, *SHARDED) == before
    if name in ("generate", "features"):  # seeds reads its sources from the beginning
        assert shards_made(run) == [(name, 2)]
    (found,) = [event["files"] for event in last_events(run) if event["event"] == "damaged"]
    assert found == [file]
    if name != "check":  # whose answers are timed
        assert (stage.path / file).read_bytes() == whole
    assert all(latest(run, other).verify() == [] for other in STAGES)
    assert stages_run(again()) == []


@pytest.mark.parametrize(("name", "reader"), [("generate", "features"), ("features", "train")])
def test_a_bit_that_rotted_is_found_when_it_is_read(copied_run, again, name, reader):
    before, stage = contents(copied_run, *SHARDED), latest(copied_run, name)
    rot(stage.shard_path(1))
    assert len(stage.verify()) == 1
    assert stages_run(again()) == [], "unread files cost nothing"
    run = again(fresh=reader, until=reader)
    assert stages_run(run) == [reader, name, reader]
    assert [made for made in shards_made(run) if made[0] == name] == [(name, 1)]
    assert contents(run, *SHARDED) == before and stage.verify() == []


def test_damage_upstream_does_not_cancel_a_fresh_stage(copied_run, again):
    rot(latest(copied_run, "generate").shard_path(1))
    latest(copied_run, "features").shard_path(1).unlink()
    run = again(fresh="train", until="train")
    assert stages_run(run) == ["features", "generate", "features", "train"]


@pytest.mark.parametrize("damaged", [False, True])
def test_a_lost_record_is_read_from_the_whole_shards(copied_run, again, damaged):
    before, stage = contents(copied_run, "features"), latest(copied_run, "features")
    (stage.path / "DONE.json").unlink()
    assert stage.verify() == [] and all(read_receipt(path) for path in stage.shards())
    if damaged:
        flip(stage.shard_path(3))
        assert stage.verify()[0].startswith(str(stage.shard_path(3)))
    run = again()
    assert stages_run(run) == ["features"] and shards_made(run) == [("features", 3)] * damaged
    assert contents(run, "features") == before


def test_a_killed_writer_s_temporary_file_is_removed(copied_run, again):
    stage = latest(copied_run, "generate")
    orphan = stage.path / "shards" / "00001.parquet.0123456789ab.tmp"
    orphan.write_bytes(stage.shard_path(1).read_bytes()[:100])
    assert stages_run(again()) == []
    assert not orphan.exists()


def test_other_content_makes_exactly_its_dependants_again(copied_run, again, monkeypatch):
    """An engine that is not repeatable writes another answer in the one shard that is lost."""

    class Other(generate.Worker):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **{**more, "seed": 12345})

    monkeypatch.setattr(generate, "Worker", Other)
    before = contents(copied_run, *SHARDED)
    latest(copied_run, "generate").shard_path(2).unlink()
    run = again()
    assert stages_run(run) == STAGES[1:] and shards_made(run) == [("generate", 2), ("features", 2)]
    after = contents(run, *SHARDED)
    for name in SHARDED:
        changed = [index for index in range(4) if before[name][index] != after[name][index]]
        assert changed == ([] if name == "seeds" else [2])


def test_seeds_that_change_while_they_are_read_are_refused(make_config, tmp_path, monkeypatch):
    path = save_seeds(tmp_path / "seeds.jsonl")
    config, whole, read = (
        make_config(tmp_path, seeds__sources=[{"path": str(path)}]),
        path.read_text(),
        seeds.seed_rows,
    )

    def append(*arguments):
        path.write_text(whole + json.dumps({"prompt": "one more"}) + "\n")
        return read(*arguments)

    with monkeypatch.context() as patch, pytest.raises(DataError, match=f"changed .*{path}"):
        patch.setattr(seeds, "seed_rows", append)
        run_again(config, until="seeds")
    path.write_text(whole)
    run = run_again(config, until="seeds")
    assert stages_run(run) == ["seeds"] and latest(run, "seeds").summary["rows"] == 40


def test_weights_that_are_swapped_during_a_run_leave_nothing(
    make_config, tiny_target, tmp_path, monkeypatch
):
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    weights, work = target / "model.safetensors", features.Worker.__call__
    own, other = weights.read_bytes(), load_file(weights)
    other["model.norm.weight"] *= 2

    def swap_first(self, *tasks):
        save_file(other, weights, {"format": "pt"})
        return work(self, *tasks)

    config = make_config(tmp_path, target__model=str(target))
    with monkeypatch.context() as patch, pytest.raises(DataError, match=f"changed .*{weights}"):
        patch.setattr(features.Worker, "__call__", swap_first)
        run_again(config, until="features")
    weights.write_bytes(own)
    run = run_again(config, until="features")
    assert stages_run(run) == ["features"]
    assert shards_made(run) == [("features", index) for index in range(4)]


@pytest.mark.parametrize("silent", ["the Hub", "the disk"])
def test_a_stage_is_kept_if_its_input_becomes_unreadable(copied_run, again, monkeypatch, silent):
    """At its end the Hub is not asked again; a disk that does not answer is not a change."""
    found, looks = run_context.weight_files, []

    def answering_once(spec, *, fetch=True):
        looks.append(fetch)
        if len(looks) > 1 and (fetch or silent == "the disk"):
            raise EnvironmentFault("It does not answer.")
        return found(spec, fetch=fetch)

    latest(copied_run, "features").shard_path(2).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(run_context, "weight_files", answering_once)
        if silent == "the disk":
            with pytest.raises(EnvironmentFault, match="does not answer"):
                again()
        else:
            again()
    assert len(looks) > 1 and shards_made(copied_run)[-1:] == [("features", 2)]
    assert shards_made(again()) == []
