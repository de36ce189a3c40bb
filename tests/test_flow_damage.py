"""Damage is found, named and mended, and nothing whole is done twice for it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from pipeline.errors import DataError, EnvironmentFault
from pipeline.run import context as run_context
from pipeline.run.reporting import drawing_data
from pipeline.stages import features, seeds
from pipeline.storage import fingerprint as file_facts
from pipeline.storage.fingerprint import sha256_of
from pipeline.storage.receipts import Receipt, read_receipt
from pipeline.storage.shards import ShardTask
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


@pytest.mark.parametrize("damage", ["delete", "truncate", "lose its quarantine file"])
@pytest.mark.parametrize("name", SHARDED)
def test_a_lost_shard_is_redone_alone_and_dependants_are_kept_as_its_content_is_equal(
    copied_run, make_config, tmp_path, name, damage
):
    before = contents(copied_run, *SHARDED)
    stage = latest(copied_run, name)
    if damage == "delete":
        stage.shard_path(2).unlink()
    elif damage == "truncate":
        stage.shard_path(2).write_bytes(stage.shard_path(2).read_bytes()[:-100])
    else:
        stage.quarantine_path(2).unlink()
    assert len(stage.verify()) == 1
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == [name]
    if name != "seeds":  # which reads its sources from the beginning
        assert shards_made(run) == [(name, 2)]
    assert contents(run, *SHARDED) == before
    assert all(latest(run, other).verify() == [] for other in STAGES)


def flip_a_bit(path: Path, *, keep_time: bool) -> None:
    """In the largest column's middle, as a bad disk does (which leaves the time alone) or a bad
    hand.
    """
    with pq.ParquetFile(path) as shard:
        group = shard.metadata.row_group(0)
        column = max(
            map(group.column, range(group.num_columns)), key=lambda c: c.total_compressed_size
        )
    stat, data = path.stat(), bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 0x10
    path.write_bytes(data)
    if keep_time:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("name", SHARDED)
def test_a_flipped_bit_is_found_by_verify_and_redone_by_run_and_nothing_else_is(
    copied_run, make_config, tmp_path, name
):
    before, stage = contents(copied_run, *SHARDED), latest(copied_run, name)
    flip_a_bit(stage.shard_path(1), keep_time=False)
    assert [problem.partition(" ")[0] for problem in stage.verify()] == [str(stage.shard_path(1))]
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == [name] and contents(run, *SHARDED) == before
    assert name == "seeds" or shards_made(run) == [(name, 1)]
    assert [event["files"] for event in last_events(run) if event["event"] == "damaged"] == [
        ["shards/00001.parquet"]
    ]
    assert stage.verify() == [] and stages_run(run_again(make_config(tmp_path))) == []


@pytest.mark.parametrize(("name", "reader"), [("generate", "features"), ("features", "train")])
def test_a_bit_that_rotted_in_place_is_found_when_it_is_read_and_the_run_mends_it_and_goes_on(
    copied_run, make_config, tmp_path, name, reader
):
    before, stage = contents(copied_run, *SHARDED), latest(copied_run, name)
    flip_a_bit(stage.shard_path(1), keep_time=True)
    assert len(stage.verify()) == 1
    assert stages_run(run_again(make_config(tmp_path))) == [], "what nobody reads costs nothing"
    run = run_again(make_config(tmp_path), fresh=reader, until=reader)
    assert stages_run(run) == [reader, name, reader]
    assert [made for made in shards_made(run) if made[0] == name] == [(name, 1)]
    assert contents(run, *SHARDED) == before and stage.verify() == []


@pytest.mark.parametrize(
    ("name", "file"), [("train", "heads.safetensors"), ("calibrate", "tree.json")]
)
def test_another_damaged_file_is_made_again_to_the_same_bytes_and_what_follows_is_kept(
    copied_run, make_config, tmp_path, name, file
):
    path = latest(copied_run, name).path / file
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    assert len(latest(copied_run, name).verify()) == 1
    assert stages_run(run_again(make_config(tmp_path))) == [name]
    assert path.read_bytes() == whole


def test_a_copy_that_lost_its_times_is_read_once_and_then_believed(
    copied_run, make_config, tmp_path, monkeypatch
):
    for path in copied_run.path.rglob("*"):
        os.utime(path, follow_symlinks=False)
    read: list[Path] = []
    monkeypatch.setattr(file_facts, "sha256_of", lambda path: read.append(path) or sha256_of(path))
    assert stages_run(run_again(make_config(tmp_path))) == []
    assert {path.name for path in read} >= {"00000.parquet", "heads.safetensors"}
    read.clear()
    assert stages_run(run_again(make_config(tmp_path))) == [] and read == []


def test_verify_of_a_half_done_stage_names_its_damaged_shard_and_run_redoes_it(
    copied_run, make_config, tmp_path
):
    stage = latest(copied_run, "features")
    (stage.path / "DONE.json").unlink()
    assert stage.verify() == []
    flip_a_bit(stage.shard_path(3), keep_time=False)
    assert [problem.partition(" ")[0] for problem in stage.verify()] == [str(stage.shard_path(3))]
    assert shards_made(run_again(make_config(tmp_path))) == [("features", 3)]


def test_lost_heads_are_trained_again_to_the_same_weights(copied_run, make_config, tmp_path):
    from safetensors.torch import load_file

    heads = latest(copied_run, "train").path / "heads.safetensors"
    before = {name: tensor.clone() for name, tensor in load_file(heads).items()}
    heads.unlink()
    run = run_again(make_config(tmp_path))
    assert stages_run(run)[0] == "train"
    after = load_file(heads)
    assert all((after[name] == tensor).all() for name, tensor in before.items())


def test_a_shard_of_another_run_in_the_place_of_ours_is_replaced(copied_run, make_config, tmp_path):
    other = run_again(
        make_config(tmp_path, run__name="other", generate__temperature=1.5), until="generate"
    )
    ours, before = latest(copied_run, "generate"), contents(copied_run, "generate")
    shutil.copy(latest(other, "generate").shard_path(1), ours.shard_path(1))
    assert [problem.partition(" ")[0] for problem in ours.verify()] == [str(ours.shard_path(1))]
    run = run_again(make_config(tmp_path))
    assert shards_made(run) == [("generate", 1)]
    assert contents(run, "generate") == before


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_damaged_answers_are_decoded_again(copied_run, make_config, tmp_path, damage):
    answers = latest(copied_run, "check").path / "answers" / "plain.jsonl"
    answers.write_text("{}\n") if damage == "changed" else shutil.rmtree(answers.parent)
    assert stages_run(run_again(make_config(tmp_path))) == ["check"]
    assert latest(copied_run, "check").verify() == []
    assert json.loads(answers.read_text().splitlines()[0])["choices"]


def test_no_curve_is_drawn_of_a_damaged_log(copied_run):
    log = latest(copied_run, "train").path / "metrics.jsonl"
    assert drawing_data(copied_run).losses
    log.write_text(log.read_text().replace('"loss": ', '"losr": ', 1))
    assert drawing_data(copied_run).losses == drawing_data(copied_run).held_out == []


def test_what_a_killed_writer_left_behind_is_swept_and_never_taken_for_a_shard(
    copied_run, make_config, tmp_path
):
    stage = latest(copied_run, "generate")
    orphan = stage.path / "shards" / "00001.parquet.0123456789ab.tmp"
    orphan.write_bytes(stage.shard_path(1).read_bytes()[:100])
    assert stages_run(run_again(make_config(tmp_path))) == []
    assert not orphan.exists()


def test_a_store_that_lost_a_receipt_file_reads_it_from_the_shards_themselves(
    copied_run, make_config, tmp_path
):
    stage = latest(copied_run, "generate")
    (stage.path / "DONE.json").unlink()
    assert all(read_receipt(path) for path in stage.shards())
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == ["generate"] and shards_made(run) == []
    assert last_events(run)[-1]["event"] == "run-finished"


def test_what_comes_out_differently_is_followed_by_exactly_what_depends_on_it(
    copied_run, make_config, tmp_path, monkeypatch
):
    """An engine that is not repeatable writes another answer in the one shard that is made anew."""
    from pipeline.stages import generate

    class Other(generate.Worker):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **{**more, "seed": 12345})

    monkeypatch.setattr(generate, "Worker", Other)
    before = contents(copied_run, *SHARDED)
    latest(copied_run, "generate").shard_path(2).unlink()
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == STAGES[1:] and shards_made(run) == [("generate", 2), ("features", 2)]
    after = contents(run, *SHARDED)
    assert {
        (name, index)
        for name in SHARDED
        for index in range(4)
        if before[name][index] != after[name][index]
    } == {
        ("generate", 2),
        ("features", 2),
    }


def test_seeds_that_change_while_they_are_read_are_not_stored_as_what_they_were(
    make_config, tmp_path, monkeypatch
):
    path = save_seeds(tmp_path / "seeds.jsonl")
    config, whole = make_config(tmp_path, seeds__sources=[{"path": str(path)}]), path.read_text()

    def append(*arguments: object) -> Iterator[object]:
        path.write_text(whole + json.dumps({"prompt": "one more"}) + "\n")
        return read(*arguments)

    read = seeds._read
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=f"seeds changed while it ran: {path}"),
    ):
        patch.setattr(seeds, "_read", append)
        run_again(config, until="seeds")
    path.write_text(whole)
    run = run_again(config, until="seeds")
    assert stages_run(run) == ["seeds"] and latest(run, "seeds").summary["rows"] == 40


def test_weights_that_are_swapped_during_a_run_leave_nothing_behind_when_they_are_swapped_back(
    make_config, tiny_target, tmp_path, monkeypatch
):
    target = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    weights, work = target / "model.safetensors", features.Worker.__call__
    own, other = weights.read_bytes(), load_file(weights)
    other["model.norm.weight"] *= 2

    def swap_first(self: features.Worker, task: ShardTask) -> Receipt:
        save_file(other, weights, {"format": "pt"})
        return work(self, task)

    config = make_config(tmp_path, target__model=str(target))
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=f"features changed while it ran: {weights}"),
    ):
        patch.setattr(features.Worker, "__call__", swap_first)
        run_again(config, until="features")
    weights.write_bytes(own)
    run = run_again(config, until="features")
    assert shards_made(run) == [("features", index) for index in range(4)] and stages_run(run) == [
        "features"
    ]


@pytest.mark.parametrize("silent", ["the Hub", "the disk"])
def test_a_stage_is_not_dropped_because_its_input_cannot_be_looked_at_again(
    copied_run, make_config, tmp_path, monkeypatch, silent
):
    """A Hub that does not answer at the end of a night is not asked; a disk that does not is no
    change either.
    """
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
                run_again(make_config(tmp_path))
        else:
            run_again(make_config(tmp_path))
    assert len(looks) > 1 and shards_made(copied_run)[-1:] == [("features", 2)]
    run = run_again(make_config(tmp_path))
    assert shards_made(run) == [], "what was made is kept"
