"""A run goes to an object store and comes back byte for byte; what does not fit is refused and nothing is lost."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.archive import storing
from pipeline.archive.manifest import MANIFEST, Manifest, object_name
from pipeline.archive.places import open_place
from pipeline.archive.restoring import restore_run
from pipeline.archive.storing import store_run
from pipeline.cli.app import app
from pipeline.cli.verify import verify
from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.storage.checksums import sha256_of
from pipeline.storage.run_directory import RunDirectory
from tests.archive.s3_server import KEY, Bucket
from tests.flows.tiny import latest, run_again, stages_run

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-no-consequence")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    made = Bucket()
    yield made
    made.close()


def content(run: Path) -> dict[str, str]:
    """The sha256 of every file of a run that counts, and where its links lead."""
    found = {}
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        if path.is_symlink():
            found[name] = str(path.resolve().relative_to(run.resolve()))
        elif path.is_file() and path.name not in ("lock", "digests.json"):  # a cache of what was read here
            found[name] = sha256_of(path)
    return found


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


@pytest.fixture
def archived(copied_run, tmp_path) -> Path:
    """A folder that holds an archive of the run, whole."""
    store_run(copied_run, open_place(str(tmp_path / "archive")))
    return tmp_path / "archive"


def object_of(copied_run, archived) -> Path:
    name = f"{latest(copied_run, 'train').path.name}/heads.safetensors"
    return archived / object_name(Manifest.read(open_place(str(archived))).files[name].sha256)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["gone", "cut", "elsewhere", "pipe"])
def test_what_an_archive_has_lost_is_sent_again(copied_run, archived, tmp_path, how):
    lost, place = object_of(copied_run, archived), open_place(str(archived))
    whole = lost.read_bytes()
    if how == "elsewhere":
        lost.rename(archived / "objects" / lost.name)
    elif how == "cut":
        os.truncate(lost, len(whole) - 1)
    else:
        lost.unlink()
    if how == "pipe":
        os.mkfifo(lost)
    with pytest.raises(DataError, match=r"heads\.safetensors is (missing from|damaged in) the archive") as caught:
        restore_run(place, tmp_path / "half")
    assert ("Delete verified/" in caught.value.fix) == ("damaged" in str(caught.value)), "what is missing has no mark"
    assert store_run(copied_run, place).num_sent == 1 and lost.read_bytes() == whole
    restore_run(place, tmp_path / "back")
    assert content(tmp_path / "back") == content(copied_run.path)


def test_a_refusal_names_the_mark_without_which_a_damaged_object_is_sent_again(copied_run, archived, tmp_path):
    damaged, place = object_of(copied_run, archived), open_place(str(archived))
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DataError, match="damaged in the archive") as caught:
        restore_run(place, tmp_path / "half")
    mark = f"verified/{damaged.name}"
    assert f"Delete {mark} there" in caught.value.fix
    (archived / mark).unlink()
    assert store_run(copied_run, place).num_sent == 1
    restore_run(place, tmp_path / "back")
    assert content(tmp_path / "back") == content(copied_run.path)


def test_a_name_in_an_archive_that_is_no_text_is_refused(copied_run, archived):
    (archived / "objects" / "\udcff\udcfe").write_text("somebody's")
    with pytest.raises(DataError, match="no UTF-8"):
        store_run(copied_run, open_place(str(archived)))


def test_an_archive_is_not_written_through_a_link(copied_run, archived, tmp_path):
    folder, outside = object_of(copied_run, archived).parent, tmp_path / "outside"
    outside.mkdir()
    shutil.rmtree(folder)
    folder.symlink_to(outside)
    with pytest.raises(DataError, match="A link leads out of the archive"):
        store_run(copied_run, open_place(str(archived)))
    assert not list(outside.iterdir())


def test_what_is_half_copied_is_not_written_through_a_link_either(tmp_path):
    place, outside = open_place(str(tmp_path / "archive")), tmp_path / "outside.txt"
    (tmp_path / "archive" / "objects").mkdir(parents=True)
    outside.write_text("somebody's")
    (tmp_path / "archive" / "objects" / "x.tmp").symlink_to(outside)
    place.write("objects/x", iter([b"ours"]))
    assert outside.read_text() == "somebody's"
    found = tmp_path / "archive" / "objects" / "x"
    assert found.read_bytes() == b"ours" and not found.is_symlink()


@pytest.mark.parametrize(
    "how", ["damaged record", "no description", "foreign description", "linked", "gone", "of another stage"]
)
def test_a_run_of_which_nobody_can_say_which_files_count_is_not_archived(copied_run, tmp_path, how):
    stage, link = latest(copied_run, "train").path, copied_run.path / "latest" / "train"
    described = stage / "stage.json"
    if how == "damaged record":
        (stage / "DONE.json").write_text("{")
    elif how == "no description":
        described.unlink()
    elif how == "foreign description":
        described.write_text(json.dumps(json.loads(described.read_text()) | {"fingerprint": "f" * 64}))
    elif how == "linked":
        shutil.move(described, tmp_path / "linked")
        described.symlink_to(tmp_path / "linked")
    elif how == "gone":
        shutil.rmtree(stage)
    else:
        link.unlink()
        link.symlink_to(latest(copied_run, "features").path)
    refused = CliRunner().invoke(app, ["archive", str(copied_run.path), str(tmp_path / "archive")])
    assert isinstance(refused.exception, DataError) and "train" in str(refused.exception)
    assert not (tmp_path / "archive" / MANIFEST).exists()


@pytest.mark.parametrize("other", [False, True], ids=["", "but for one to something else"])
def test_a_run_whose_links_are_gone_is_neither_archived_nor_said_to_be_whole(copied_run, tmp_path, other):
    shutil.rmtree(copied_run.path / "latest")
    if other:
        (copied_run.path / "latest").mkdir()
        (copied_run.path / "latest" / "other").symlink_to(tmp_path)
    with pytest.raises(DataError, match="has no stage: there is nothing to archive"):
        store_run(copied_run, open_place(f"file://{tmp_path}/store"))
    with pytest.raises(ConfigError, match="has no stage: there is nothing to verify"):
        verify(copied_run.path)


def test_nothing_is_locked_through_a_link_in_the_place_of_a_stage(copied_run, tmp_path):
    stage = latest(copied_run, "check").path
    shutil.move(stage, outside := tmp_path / "outside")
    (outside / "lock").unlink(missing_ok=True)
    stage.symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    with pytest.raises(DataError, match="A link leads out of the run directory"):
        store_run(copied_run, open_place(str(tmp_path / "archive")))
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before


def test_a_restore_overwrites_nothing(copied_run, tmp_path):
    place, back = open_place(str(tmp_path / "archive")), tmp_path / "back"
    store_run(copied_run, place)
    back.mkdir()
    (back / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="Another file lies") as caught:
        restore_run(place, back)
    assert caught.value.where == str(back / "thesis.txt") and os.listdir(back) == ["thesis.txt"]
    (back / "thesis.txt").rename(back / "run.yaml")
    with pytest.raises(ConfigError, match="Another file lies"):
        restore_run(place, back)
    assert (back / "run.yaml").read_text() == "mine"


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil", "nul\0"])
@pytest.mark.parametrize("part", ["files", "links"])
def test_a_manifest_that_names_files_outside_of_the_run_is_refused(copied_run, tmp_path, name, part):
    place = open_place(str(tmp_path / "archive"))
    store_run(copied_run, place)
    manifest = Manifest.read(place)
    facts = next(iter(manifest.files.values()))
    evil = {"files": {name: facts}} if part == "files" else {"links": {"train": name}}
    Manifest(**{**vars(manifest), **evil}).write(place)
    with pytest.raises(DataError, match="outside of the run"):
        restore_run(place, tmp_path / "back")
    assert not (tmp_path / "back").exists() and not (tmp_path / "evil").exists()


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"null", b'{"run": 3}', b"\xff\xfe", b"{"])
def test_a_manifest_that_is_none_is_refused(tmp_path, content):
    place = open_place(str(tmp_path))
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        Manifest.read(place)


def test_a_manifest_in_which_a_figure_was_changed_is_refused(copied_run, tmp_path):
    place = open_place(str(tmp_path / "archive"))
    store_run(copied_run, place)
    said = json.loads((tmp_path / "archive" / MANIFEST).read_text())
    said["files"]["run.yaml"]["size"] += 1
    (tmp_path / "archive" / MANIFEST).write_text(json.dumps(said))
    with pytest.raises(DataError, match="damaged"):
        Manifest.read(place)


def test_credentials_that_are_refused_or_missing_end_in_one_paragraph_that_names_them(copied_run, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "SOMEONE")
    with pytest.raises(EnvironmentFault) as caught:
        store_run(copied_run, open_place(bucket.address("mine")))
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix and "\n" not in str(caught.value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(EnvironmentFault) as caught:
        store_run(copied_run, open_place(bucket.address("mine")))
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix and not bucket.objects


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        ("foo://somewhere/x", ConfigError, "unknown scheme"),
        ("sftp://host/x", EnvironmentFault, "not installed"),
        ("s3://key:hunter2@bucket/x", ConfigError, "holds a password"),
        ("s3://bucket/x?secret_key=hunter2", ConfigError, "holds a password"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(address, error, said):
    with pytest.raises(error, match=said) as caught:
        open_place(address)
    assert "hunter2" not in str(caught.value) and caught.value.exit_code in (2, 4)


@pytest.mark.parametrize("name", ["a b", "a#b", "a?b", "a%20b", "100%", "\u00e4", "a:b/c", "plain/"])
def test_a_path_is_that_directory_whatever_its_name_holds(tmp_path, monkeypatch, name):
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "there").write_text("x")
    monkeypatch.chdir(tmp_path)
    for address in (str(tmp_path / name), f"./{name}"):
        assert set(open_place(address).sizes("")) == {"there"}
