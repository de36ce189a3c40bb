"""What the tampering benchmark has found, each once: files that are none, links, foreign names, damaged records."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.cli.inspect import inspect
from pipeline.cli.verify import verify
from pipeline.config.load import load_config
from pipeline.errors import CheckFailed, DataError, EnvironmentFault, MedusaDistillError
from pipeline.export.layout import read_layout
from pipeline.export.weights import WeightsFile
from pipeline.flow import push_run
from pipeline.run.reporting import assemble
from pipeline.storage.run_directory import RunDirectory
from tests.flows.tiny import contents, latest, run_again, stages_run

pytestmark = pytest.mark.slow

PLACES = (
    *("latest/train/DONE.json", "latest/train/stage.json", "latest/train/metrics.jsonl", "latest/export/config.json"),
    *("latest/features/shards/00001.parquet", "latest/features/receipts/00001.json", "latest/seeds/lock"),
    *("latest/generate/quarantine/00002.jsonl", "events.jsonl", "lock", "digests.json", "report.json"),
)

TYPES = '{"generate": 7, "features": {"tokens_per_second": 5, "positions": "x", "tokens": [1]}, "train": {}}'


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", PLACES)
def test_a_pipe_in_the_place_of_a_file_is_never_waited_for(copied_run, make_config, tmp_path, place):
    """It is made again, or refused with its name; a command that reads it says what it can."""
    before = contents(copied_run, "seeds", "generate", "features")
    path = (copied_run.path / place).resolve()
    path.unlink()
    os.mkfifo(path)
    for story in (lambda: verify(copied_run.path), lambda: run_again(make_config(tmp_path))):
        try:
            story()
        except MedusaDistillError as refused:
            assert path.name in str(refused)
    assert contents(copied_run, "seeds", "generate", "features") == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["model.safetensors", "medusa_lm_head.pt"])
def test_a_pipe_in_the_place_of_weights_is_never_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="no file"):
        WeightsFile(tmp_path / name)


@pytest.mark.parametrize("place", ["events.jsonl", "lock", "latest/train/lock", "latest/train/metrics.jsonl"])
def test_a_hard_link_outside_is_not_written_through(copied_run, make_config, tmp_path, place):
    outside = tmp_path / "outside"
    os.link((copied_run.path / place).resolve(), outside)
    before = outside.read_bytes(), outside.stat().st_mtime_ns
    run_again(make_config(tmp_path), fresh="train", until="train")
    assert (outside.read_bytes(), outside.stat().st_mtime_ns) == before
    assert stages_run(copied_run) == ["train"]


def test_no_summary_is_shown_in_place_of_rows_that_are_gone(copied_run):
    stage = latest(copied_run, "seeds").path
    (stage / "shards").rename(stage / "elsewhere")
    with pytest.raises(DataError, match="Rows of seeds are missing"):
        inspect(copied_run.path, "seeds")


def test_a_shard_whose_name_is_no_utf_8_is_foreign_as_any_other(copied_run, make_config, tmp_path):
    shards = latest(copied_run, "generate").path / "shards"
    shutil.copy2(shards / "00000.parquet", shards / "\udcff\udcfe.parquet")
    with pytest.raises(CheckFailed, match="of another run, or damaged"):
        verify(copied_run.path)


def test_what_somebody_puts_beside_the_links_to_stages_is_no_stage(copied_run, make_config, tmp_path):
    links = copied_run.path / "latest"
    (links / "notes").write_text("mine")
    (links / "folder").mkdir()
    (links / "[red]").symlink_to(latest(copied_run, "train").path)
    (links / "gone").symlink_to("nowhere")
    known = set(run_again(make_config(tmp_path)).stages())
    assert known == {"seeds", "generate", "features", "train", "calibrate", "export", "check"}
    report, _ = assemble(*RunDirectory.open(copied_run.path))
    assert set(report["run"]["fingerprints"]) == known
    verify(copied_run.path)


def test_a_link_to_another_stage_than_its_name_says_is_damage_and_linked_anew(copied_run, make_config, tmp_path):
    link = copied_run.path / "latest" / "train"
    link.unlink()
    link.symlink_to(latest(copied_run, "features").path)
    assert copied_run.latest("train") is None
    with pytest.raises(CheckFailed, match=r"train: .* no stage of this name"):
        verify(copied_run.path)
    assert stages_run(run_again(make_config(tmp_path))) == [] and latest(copied_run, "train").stage == "train"


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_damaged_answers_are_a_result_and_decoded_again(copied_run, make_config, tmp_path, damage):
    answers = latest(copied_run, "check").path / "answers" / "plain.jsonl"
    answers.write_text("{}\n") if damage == "changed" else shutil.rmtree(answers.parent)
    assert stages_run(run_again(make_config(tmp_path))) == ["check"]
    assert latest(copied_run, "check").verify() == [] and json.loads(answers.read_text().splitlines()[0])["choices"]


def test_no_curve_is_drawn_of_a_log_that_somebody_changed(copied_run):
    log = latest(copied_run, "train").path / "metrics.jsonl"
    assert assemble(*RunDirectory.open(copied_run.path))[1]["losses"]
    log.write_text(log.read_text().replace('"loss": 1', '"loss": 0.1', 1))
    _, extras = assemble(*RunDirectory.open(copied_run.path))
    assert "losses" not in extras and "held_out" not in extras


def test_a_shard_is_dropped_after_what_lies_beside_it_so_that_a_refusal_loses_nothing(
    copied_run, make_config, tmp_path
):
    stage = latest(copied_run, "features")
    stage.quarantine_path(3).unlink()
    stage.quarantine_path(3).mkdir()
    whole = stage.shard_path(3).read_bytes()
    with pytest.raises(EnvironmentFault, match="A directory stands where a file belongs"):
        run_again(make_config(tmp_path))
    assert stage.shard_path(3).read_bytes() == whole
    stage.quarantine_path(3).rmdir()
    run_again(make_config(tmp_path))
    assert stage.shard_path(3).read_bytes() == whole and stage.verify() == []


def test_something_that_is_no_folder_in_the_place_of_a_stage_is_refused(copied_run, make_config, tmp_path):
    place = latest(copied_run, "calibrate").path
    shutil.rmtree(place)
    place.write_text("mine")
    with pytest.raises(EnvironmentFault, match="A directory stands where a file belongs, or the other way round"):
        run_again(make_config(tmp_path))
    assert place.read_text() == "mine"


@pytest.mark.parametrize("known", [{"*": 7}, {"*": "Z" * 64}, []])
def test_a_digest_that_is_none_is_taken_again(copied_run, make_config, tmp_path, known):
    cache = copied_run.path / "digests.json"
    found = json.loads(cache.read_text())
    cache.write_text(json.dumps(dict.fromkeys(found, known["*"]) if isinstance(known, dict) else known))
    assert stages_run(run_again(make_config(tmp_path))) == [] and json.loads(cache.read_text()) == found


@pytest.mark.parametrize("way", [Path.mkdir, os.mkfifo, lambda path: path.write_text("[" * 100_000)])
def test_an_export_s_configuration_that_is_no_file_is_refused(copied_run, way):
    path = latest(copied_run, "export").path / "config.json"
    path.unlink()
    way(path)
    with pytest.raises(DataError, match="not the configuration of an export"):
        read_layout(path.parent)


@pytest.mark.parametrize("odd", ["folder", "link outside", "lock gone"])
def test_a_run_s_own_run_yaml_means_that_run_whatever_lies_in_it(copied_run, tmp_path, odd):
    """A folder among its links, a link that leads elsewhere, a lock that is gone: nothing is made in other places."""
    elsewhere, links = tmp_path / "elsewhere", copied_run.path / "latest"
    (elsewhere / "calibrate").mkdir(parents=True)
    before = {link.name: os.readlink(link) for link in links.iterdir()}
    if odd == "folder":
        (links / "-rf").mkdir()
    elif odd == "link outside":
        (links / "calibrate").unlink()
        (links / "calibrate").symlink_to(elsewhere / "calibrate")
    else:
        (copied_run.path / "lock").unlink()
        settings = yaml.safe_load((copied_run.path / "run.yaml").read_text())
        settings["run"]["root"] = str(elsewhere)
        (copied_run.path / "run.yaml").write_text(yaml.safe_dump(settings))
    run = run_again(load_config(copied_run.path / "run.yaml"))
    assert run.path == copied_run.path and stages_run(run) == []
    assert {link.name: os.readlink(link) for link in links.iterdir() if link.is_symlink()} == before
    assert [path.name for path in elsewhere.rglob("*")] == ["calibrate"]


@pytest.mark.parametrize("relative", [True, False])
def test_a_run_s_own_run_yaml_means_that_run_where_it_is_a_link_too(copied_run, tmp_path, relative):
    elsewhere, own = tmp_path / "elsewhere", copied_run.path / "run.yaml"
    elsewhere.mkdir()
    shutil.move(own, elsewhere / "linked.yaml")
    own.symlink_to(os.path.relpath(elsewhere / "linked.yaml", own.parent) if relative else elsewhere / "linked.yaml")
    run = run_again(load_config(own))
    assert run.path == copied_run.path and stages_run(run) == []
    assert [path.name for path in elsewhere.iterdir()] == ["linked.yaml"]


@pytest.mark.parametrize("name", ["features", "calibrate"])
def test_a_file_whose_name_is_no_text_is_no_file_of_a_stage(copied_run, make_config, tmp_path, name):
    stage = latest(copied_run, name)
    odd = os.fsdecode(b"\xff\xfe")
    (stage.path / odd).write_text("mine")
    run_again(make_config(tmp_path), fresh=name, until=name)
    (stage.path / odd).write_text("mine")
    (stage.path / "DONE.json").unlink()
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == [name] and not [file for file in latest(run, name).done.files if odd in file]
    assert latest(run, name).verify() == []


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["tokenizer.json", "medusa_lm_head.safetensors"])
def test_a_push_does_not_wait_for_a_pipe(copied_run, name):
    path = latest(copied_run, "export").path / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=f"cannot be read.*{name}"):
        push_run(copied_run.path, repo_id="me/heads", base_model="owner/target", dry_run=True)
