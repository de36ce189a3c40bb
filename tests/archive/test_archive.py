"""A run goes to an object store and comes back byte for byte; what does not fit is refused and nothing is lost."""

from __future__ import annotations

import os
import shutil

import pytest
from typer.testing import CliRunner

from pipeline.archive import storing
from pipeline.archive.manifest import MANIFEST, Manifest, object_name
from pipeline.archive.places import open_place
from pipeline.archive.restoring import restore_run
from pipeline.archive.storing import store_run
from pipeline.cli.app import app
from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.storage.run_directory import RunDirectory
from tests.archive.conftest import content
from tests.flows.tiny import latest, run_again, stages_run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["s3", "file"])
def test_a_run_goes_to_an_object_store_and_comes_back_and_everything_is_kept(
    copied_run, bucket, make_config, tmp_path, kind
):
    address = bucket.address("runs/mine") if kind == "s3" else f"file://{tmp_path}/store/mine"
    stored = store_run(copied_run, open_place(address))
    assert stored.num_sent > 20 and stored.num_files >= stored.num_sent, "the same content is sent once"
    before = content(copied_run.path)
    shutil.rmtree(copied_run.path)
    restore_run(open_place(address), copied_run.path)
    assert content(copied_run.path) == before
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == [] and not [problem for stage in run.stages().values() for problem in stage.verify()]


def test_a_run_with_a_store_of_its_own_is_restored_as_one_directory_that_runs_where_it_lies(
    copied_run, make_config, tmp_path
):
    """Its stages lie in the run afterwards, and its run.yaml means the new place."""
    store = tmp_path / "shared"
    store.mkdir()
    for stage in copied_run.stages().values():
        shutil.move(stage.path, store / stage.path.name)
        copied_run.unlink_latest(stage.stage)
        (copied_run.path / "latest" / stage.stage).symlink_to(f"../../shared/{stage.path.name}")
    run_again(make_config(tmp_path, run__store=str(store)))
    address = str(tmp_path / "archive")
    assert CliRunner().invoke(app, ["archive", str(copied_run.path), address]).exit_code == 0
    shutil.rmtree(store)
    shutil.rmtree(copied_run.path)
    moved = tmp_path / "elsewhere" / "again"
    assert CliRunner().invoke(app, ["restore", address, str(moved)]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", str(moved)]).exit_code == 0
    from pipeline.config.load import load_config

    config = load_config(moved / "run.yaml")
    assert config.run.directory == moved and config.run.store is None
    assert stages_run(run_again(config)) == []


def test_what_has_arrived_is_not_sent_again_and_an_unfinished_object_does_not_count(copied_run, bucket):
    place, sent = open_place(bucket.address("mine")), []
    bucket.fail = lambda method, key: method == "PUT" and len(bucket.puts) >= 25
    with pytest.raises(EnvironmentFault, match=r"ACCESS_DENIED|Access Denied") as caught:
        store_run(copied_run, place)
    assert "the same command continues" in caught.value.fix
    with pytest.raises(DataError, match="no finished archive"):
        restore_run(place, copied_run.path.parent / "half")
    bucket.fail = lambda method, key: False
    verified = {key.rpartition("/")[2] for key in bucket.objects if "/verified/" in key}
    assert verified
    bucket.puts.clear()
    store_run(copied_run, place, lambda done, total, num_bytes: sent.append((done, total)))
    again = {key.rpartition("/")[2] for key in bucket.puts if "/objects/" in key}
    assert again and not again & verified
    assert sent[0][0] == len(verified) and sent[-1][0] == sent[-1][1]
    assert [done for done, _ in sent] == sorted(done for done, _ in sent)
    bucket.puts.clear()
    assert store_run(copied_run, place).num_sent == 0
    assert bucket.puts == [f"mine/{MANIFEST}"], "nothing but the manifest"


def test_a_large_file_goes_in_parts(copied_run, bucket):
    big = os.urandom(23 * 1024**2)
    (copied_run.path / "report.html").write_bytes(big)
    store_run(copied_run, open_place(bucket.address("mine")))
    assert big in bucket.objects.values() and not bucket.uploads
    restore_run(open_place(bucket.address("mine")), copied_run.path.parent / "back")
    assert (copied_run.path.parent / "back" / "report.html").read_bytes() == big


def test_the_archive_of_another_run_and_a_folder_of_other_things_are_left_alone(copied_run, bucket, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(copied_run.path, other, symlinks=True)
    (other / "events.jsonl").write_text('{"time": 1, "event": "run-started"}\n')
    store_run(copied_run, open_place(bucket.address("mine")))
    bucket.objects["strangers/photo.jpg"] = b"photo"
    before = dict(bucket.objects)
    with pytest.raises(ConfigError, match="of another run"):
        store_run(RunDirectory(other), open_place(bucket.address("mine")))
    with pytest.raises(ConfigError, match="Something else lies there"):
        store_run(RunDirectory(other), open_place(bucket.address("strangers")))
    assert bucket.objects == before
    shutil.copytree(copied_run.path, tmp_path / "copy", symlinks=True)
    assert store_run(RunDirectory(tmp_path / "copy"), open_place(bucket.address("mine"))).num_sent == 0, "the same run"


def test_a_run_that_is_being_written_is_refused(copied_run, bucket):
    with copied_run.locked(), pytest.raises(EnvironmentFault, match="Another run holds"):
        store_run(RunDirectory(copied_run.path), open_place(bucket.address("mine")))
    stage = latest(copied_run, "train")
    with stage.lock:
        stage.lock.own()
        with pytest.raises(EnvironmentFault, match="the train stage"):
            store_run(RunDirectory(copied_run.path), open_place(bucket.address("mine")))
    assert not bucket.objects


def test_a_damaged_file_is_not_archived_under_its_old_sum(copied_run, bucket):
    path = latest(copied_run, "train").path / "heads.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"not what DONE\.json says") as caught:
        store_run(copied_run, open_place(bucket.address("mine")))
    assert caught.value.where == str(path) and f"mine/{MANIFEST}" not in bucket.objects
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        store_run(copied_run, open_place(bucket.address("mine")))


def test_links_of_another_program_are_left_out_and_one_in_the_place_of_a_file_is_refused(copied_run, bucket, tmp_path):
    stage = latest(copied_run, "train").path
    (stage / "wandb").mkdir()
    (tmp_path / "log").write_text("somebody's")
    (stage / "wandb" / "debug.log").symlink_to(tmp_path / "log")
    store_run(copied_run, open_place(bucket.address("mine")))
    assert not any("debug.log" in name for name in Manifest.read(open_place(bucket.address("mine"))).files)
    shutil.move(stage / "heads.safetensors", tmp_path / "heads")
    (stage / "heads.safetensors").symlink_to(tmp_path / "heads")
    with pytest.raises(DataError, match="A link leads out"):
        store_run(copied_run, open_place(bucket.address("mine")))


def test_a_shard_that_no_record_names_is_left_out(copied_run, tmp_path):
    stage = latest(copied_run, "generate")
    shutil.copy(stage.shards()[0], stage.path / "shards" / "step-abc.parquet")
    assert stage.verify(), "which verify calls damaged"
    store_run(copied_run, open_place(f"file://{tmp_path}/store"))
    restore_run(open_place(f"file://{tmp_path}/store"), tmp_path / "restored")
    restored = RunDirectory.open(tmp_path / "restored")[0]
    assert not [problem for stage in restored.stages().values() for problem in stage.verify()]


def test_what_does_not_arrive_as_it_was_sent_is_noticed(copied_run, bucket, monkeypatch):
    monkeypatch.setattr(storing, "BLOCK", 64)
    place = open_place(bucket.address("mine"))
    honest = type(place).blocks

    def flipped(self, name):
        for block in honest(self, name):
            yield bytes([block[0] ^ 1]) + block[1:]

    monkeypatch.setattr(type(place), "blocks", flipped)
    with pytest.raises(DataError, match="is not what was sent"):
        store_run(copied_run, place)
    assert not [key for key in bucket.objects if "/verified/" in key]


@pytest.mark.parametrize("how", ["flipped", "missing"])
def test_a_damaged_archive_is_told_and_what_was_restored_is_kept(copied_run, bucket, tmp_path, how):
    place, back = open_place(bucket.address("mine")), tmp_path / "back"
    store_run(copied_run, place)
    name = f"{latest(copied_run, 'train').path.name}/heads.safetensors"
    key = f"mine/{object_name(Manifest.read(place).files[name].sha256)}"
    whole = bucket.objects.pop(key)
    if how == "flipped":
        bucket.objects[key] = bytes([whole[0] ^ 1]) + whole[1:]
    with pytest.raises(DataError, match=r"damaged|missing") as caught:
        restore_run(place, back)
    assert name in caught.value.what and not (back / name).exists() and not list(back.rglob("*.tmp"))
    assert not (back / "run.yaml").exists(), "half a run is no run directory"
    bucket.objects[key] = whole
    there = sum(path.is_file() for path in back.rglob("*"))
    restored = restore_run(place, back)
    assert there and restored.num_sent == restored.num_files - there, "what was there is not fetched again"
    assert content(back) == content(copied_run.path)


def test_what_only_an_unfinished_stage_needs_goes_only_while_it_is_unfinished(copied_run, tmp_path):
    """Checkpoints of training, which are larger than the heads; logs and the card go always."""
    train, address = latest(copied_run, "train").path, str(tmp_path / "archive")
    for name in ("checkpoints/step-00000001.safetensors", "ray/state", "tensorboard/log"):
        (train / name).parent.mkdir(exist_ok=True)
        (train / name).write_text(name)

    def kept() -> set[str]:
        assert CliRunner().invoke(app, ["archive", str(copied_run.path), address]).exit_code == 0
        names = Manifest.read(open_place(address)).files
        return {name.split("/")[1] for name in names if name.startswith(train.name)}

    of_a_finished_one = kept()
    assert {"heads.safetensors", "metrics.jsonl", "DONE.json", "tensorboard"} <= of_a_finished_one
    assert not {"checkpoints", "ray"} & of_a_finished_one
    assert CliRunner().invoke(app, ["restore", address, str(tmp_path / "back")]).exit_code == 0
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "back")]).exit_code == 0
    (train / "DONE.json").unlink()
    assert kept() - of_a_finished_one == {"checkpoints", "ray"}
