"""The flow keeps what is done, redoes what is not, and nothing else; its run directory is the
documented one.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from pipeline.config.load import load_config
from pipeline.conversations.conversation import Reason
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.executor import InlineExecutor
from pipeline.execution.placement import Resources
from pipeline.flow import run_flow, wanted_stages
from pipeline.run import context
from pipeline.storage.run_directory import RunDirectory
from tests.flows.tiny import (
    SHARDED,
    STAGES,
    changed_at,
    contents,
    latest,
    quarantined,
    report_of,
    run_again,
    shards_made,
    stages_run,
    stored,
)

REPORTED = {
    "seeds": "rows quarantined",
    "generate": "rows tokens tokens_per_second",
    "features": "positions bytes_per_position tokens_per_second",
    "train": "tokens tokens_per_second final_loss",
    "tree": "nodes expected_acceleration_rate",
    "native": "acceleration_rate overhead speedup tokens_per_second baseline_tokens_per_second",
    "hardware": "cpu",
    "versions": "torch",
}


def test_a_run_leaves_what_the_run_directory_promises(finished_run):
    path = finished_run.path
    for name in ("run.yaml", "lock", "events.jsonl", "report.json", "report.md", "report.html"):
        assert (path / name).is_file(), name
    for name in STAGES:
        link = path / "latest" / name
        assert link.is_symlink() and not os.path.isabs(os.readlink(link))
        stage = latest(finished_run, name)
        assert stage.path.name == f"{name}-{stage.fingerprint[:8]}"
        assert stage.done and stage.done.stage == name and stage.verify() == []
    for name in SHARDED:
        stage = latest(finished_run, name)
        assert [p.name for p in stage.shards()] == [f"{i:05d}.parquet" for i in range(4)]
        assert sorted(p.stem for p in (stage.path / "quarantine").iterdir()) == [
            p.stem for p in stage.shards()
        ]
    assert (path / "latest/train/heads.safetensors").is_file() and (
        path / "latest/train/metrics.jsonl"
    ).is_file()
    assert (path / "latest/calibrate/tree.json").is_file()
    assert not list(path.rglob("*.tmp"))


def test_every_row_is_kept_or_quarantined_with_a_reason(finished_run):
    known: set[str] | None = None
    for name in SHARDED:
        stage = latest(finished_run, name)
        rows, refused = stored(stage), quarantined(stage)
        assert all(row.keys() == {"id", "stage", "reason", "detail", "row"} for row in refused)
        assert all(row["stage"] == name and row["reason"] in set(Reason) for row in refused)
        ids = [row["id"] for row in rows] + [row["id"] for row in refused]
        assert len(set(ids)) == len(ids)
        assert known is None or set(ids) == known
        known = {row["id"] for row in rows}
        summary = stage.summary
        assert (summary["rows"], summary["quarantined"]) == (len(rows), len(refused))


def test_report_json_has_the_keys_that_design_promises(finished_run):
    report = report_of(finished_run)
    assert (report["method"], report["num_heads"]) == ("medusa-1", 3)
    for key, names in REPORTED.items():
        section = report["check"]["native"] if key == "native" else report[key]
        assert section.keys() >= set(names.split()), key
    assert all({"top1", "top5"} <= head.keys() for head in report["heads"])
    assert report["features"]["positions"] == report["generate"]["tokens"] > 0
    assert list(report["seconds_by_stage"]) == STAGES


def test_the_same_command_again_keeps_everything_and_computes_nothing(
    copied_run, again, monkeypatch
):
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("an engine was asked for")

    monkeypatch.setattr("pipeline.stages.generate.make_generation_engine", forbidden)
    monkeypatch.setattr("pipeline.stages.features.make_feature_engine", forbidden)
    before = {p: p.stat().st_mtime_ns for p in copied_run.path.rglob("*.parquet")}
    run = again()
    assert stages_run(run) == [] and shards_made(run) == []
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*.parquet")} == before
    _, config = RunDirectory.open(copied_run.path)
    assert stages_run(run_again(config)) == [], "run.yaml gives the same run"


def test_a_copied_run_yaml_leaves_the_original_alone(copied_run, finished_run):
    before = changed_at(finished_run.path)
    assert str(finished_run.path.parent) in (copied_run.path / "run.yaml").read_text()
    run = run_again(load_config(copied_run.path / "run.yaml", ["calibrate.nodes=7"]))
    assert run.path == copied_run.path and stages_run(run) == ["calibrate", "export", "check"]
    assert changed_at(finished_run.path) == before


@pytest.mark.parametrize(
    ("changes", "redone"),
    [
        ({"train__lr": 2e-2}, ["train", "calibrate", "export", "check"]),
        ({"calibrate__nodes": 5}, ["calibrate", "export", "check"]),
        ({"check__max_new_tokens": 10}, ["check"]),
        (
            {"train__checkpoint_every": 1, "features__tokens_per_batch": 99},
            [],
        ),
    ],
)
def test_a_changed_setting_redoes_its_stage_and_what_follows(copied_run, again, changes, redone):
    kept = {name: latest(copied_run, name).path for name in STAGES}
    run = again(**changes)
    assert stages_run(run) == redone
    for name in STAGES:
        assert (latest(run, name).path == kept[name]) == (name not in redone)
    assert stages_run(again()) == [], "nothing is overwritten"


def test_runs_that_name_one_store_share_the_feature_cache(copied_run, make_config, tmp_path):
    recipe = make_config(
        tmp_path, run__name="recipe", run__store=str(copied_run.path), train__lr=3e-2
    )
    run = run_again(recipe)
    assert run.path == tmp_path / "recipe" and stages_run(run) == [
        "train",
        "calibrate",
        "export",
        "check",
    ]
    assert latest(run, "features").path == latest(copied_run, "features").path
    assert latest(run, "train").path.parent == copied_run.path
    assert not list(run.path.glob("*-*")), "all stage directories are in the store"
    assert report_of(run)["run"]["name"] == "recipe"


def test_stages_upstream_of_named_ones_are_included(make_config, tmp_path):
    config = make_config(tmp_path)
    assert wanted_stages(config, ["train"]) == ["seeds", "generate", "features", "train"]
    with pytest.raises(ConfigError, match="no stage 'trian'"):
        wanted_stages(config, ["trian"])


def test_until_stops_after_a_stage_and_runs_continue(again):
    run = again(until="generate")
    assert stages_run(run) == ["seeds", "generate"]
    assert run.latest("features") is None and not (run.path / "report.json").exists()
    run = again(until="features")
    assert stages_run(run) == ["features"]


def test_fresh_keeps_later_stages_if_the_result_is_equal(copied_run, again):
    before = contents(copied_run, *SHARDED)
    run = again(fresh="features")
    assert stages_run(run) == ["features"]
    assert shards_made(run) == [("features", index) for index in range(4)]
    assert contents(run, *SHARDED) == before


def test_fresh_refuses_a_stage_in_use(copied_run, again):
    features = latest(copied_run, "features")
    with features.lock as lock:
        lock.share()  # as a run does that trains from it
        with pytest.raises(EnvironmentFault, match="holds the features stage"):
            again(fresh="features")
    assert features.verify() == [] and len(features.shards()) == 4


def test_the_number_of_shards_does_not_change_generated_rows(finished_run, again):
    run = again(until="generate", seeds__rows_per_shard=17)

    def rows(of: RunDirectory) -> dict[str, dict]:
        return {row["id"]: row for row in stored(latest(of, "generate"))}

    assert len(latest(run, "generate").shards()) == 3
    assert rows(run) == rows(finished_run)


def change_weights(target: Path, seeds: Path) -> None:
    """Replace the weights by those of another fine-tune: the file keeps its size."""
    tensors = load_file(target / "model.safetensors")
    tensors["model.norm.weight"] *= 1.5
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


def change_a_word(target: Path, seeds: Path) -> None:
    """Overwrite a word in place: the file keeps its size and its inode."""
    data = seeds.read_bytes()
    with seeds.open("r+b") as file:
        file.write(data.replace(b"moon", b"noon", 1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "redone"), [(change_weights, STAGES[1:]), (change_a_word, STAGES), (None, [])]
)
def test_changed_content_is_noticed_despite_equal_path_and_time(
    copied_run, make_config, tmp_path, tiny_target, tiny_seeds, change, redone
):
    target, seeds = tmp_path / "target", tmp_path / "seeds.jsonl"
    shutil.copytree(tiny_target, target)
    shutil.copy(tiny_seeds, seeds)
    config = make_config(tmp_path, target__model=str(target), seeds__sources=[{"path": str(seeds)}])
    assert stages_run(run_again(config)) == ["export", "check"], "an export names its target's path"
    before = {path: path.stat() for path in (seeds, target / "model.safetensors")}
    if change:
        change(target, seeds)
    for path, stat in before.items():
        assert path.stat().st_size == stat.st_size
        seconds = 0 if change else 1  # other times of the same content
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + seconds * 10**9))
    assert stages_run(run_again(config)) == redone
    assert stages_run(run_again(config)) == []


def test_workers_without_room_are_refused_at_once(make_config, tmp_path):
    """Training comes last, and is not found out after days of generating."""
    config = make_config(
        tmp_path, placement__train={"workers": 3, "gpus_per_worker": 7, "cpus_per_worker": 2}
    )
    with pytest.raises(
        EnvironmentFault,
        match=r"train: 3 worker.*need 6 CPU and 21 GPU.*room for 0.*placement\.train",
    ):
        run_again(config)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["lock", "run.yaml"]


def test_a_cluster_that_stands_already_says_itself_what_has_room(
    make_config, tmp_path, monkeypatch
):
    class Large(InlineExecutor):
        name = "ray"

        def resources(self) -> Resources:
            return Resources(((64, 0),))

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(context, "make_executor", lambda _: Large())
    config = make_config(tmp_path, placement__train={"workers": 64})
    with pytest.raises(EnvironmentFault, match="cannot place train: 65"):
        run_flow(
            make_config(tmp_path, placement__train={"workers": 65}),
            until="train",
            console=Console(quiet=True),
        )
    run = run_flow(config, until="generate", console=Console(quiet=True))
    assert stages_run(run) == ["seeds", "generate"]
