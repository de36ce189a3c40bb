"""What is no archive, or no run to archive, is refused with its name, and nothing is written through a link."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.archive.manifest import MANIFEST, Manifest, object_name
from pipeline.archive.places import open_place
from pipeline.archive.restoring import restore_run
from pipeline.archive.storing import store_run
from pipeline.cli.app import app
from pipeline.cli.verify import verify
from pipeline.errors import ConfigError, DataError, EnvironmentFault
from tests.archive.conftest import content
from tests.flows.tiny import latest

pytestmark = pytest.mark.slow


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
