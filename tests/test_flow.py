"""The flow keeps what is done, redoes what is not, and nothing else; its run directory is as DESIGN promises."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.config import Config
from pipeline.conversations.conversation import Reason
from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.flow import run_flow
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import read_receipt, read_rows
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import contents, last_events, shards_made, stages_run

STAGES = ["seeds", "generate", "features", "train", "calibrate", "export", "check"]
SHARDED = ("seeds", "generate", "features")


def run_again(config: Config, **options: object) -> RunDirectory:
    return run_flow(config, executor="inline", console=Console(quiet=True), **options)


def latest(run: RunDirectory, name: str) -> StageDirectory:
    stage = run.latest(name)
    assert stage is not None
    return stage


def test_a_run_leaves_what_the_run_directory_promises(finished_run):
    path = finished_run.path
    for name in ("run.yaml", "lock", "events.jsonl", "report.json", "report.md", "report.html"):
        assert (path / name).is_file(), name
    for name in STAGES:
        link = path / "latest" / name
        assert link.is_symlink() and not os.path.isabs(os.readlink(link))
        stage = latest(finished_run, name)
        assert stage.path.name == f"{name}-{stage.fingerprint[:8]}"
        assert stage.done and stage.done["stage"] == name and stage.verify() == []
    for name in SHARDED:
        stage = latest(finished_run, name)
        assert [p.name for p in stage.shards()] == [f"{i:05d}.parquet" for i in range(4)]
        assert sorted(p.stem for p in (stage.path / "quarantine").iterdir()) == [p.stem for p in stage.shards()]
    assert (path / "latest/train/heads.safetensors").is_file() and (path / "latest/train/metrics.jsonl").is_file()
    assert (path / "latest/calibrate/tree.json").is_file()
    assert not list(path.rglob("*.tmp"))


def test_every_row_of_every_stage_is_kept_or_quarantined_with_a_reason(finished_run):
    known: set[str] | None = None
    for name in SHARDED:
        stage = latest(finished_run, name)
        rows = [row for path in stage.shards() for row in read_rows(path)]
        files = sorted((stage.path / "quarantine").iterdir())
        refused = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert all(row.keys() == {"id", "stage", "reason", "detail", "row"} for row in refused)
        assert all(row["stage"] == name and row["reason"] in set(Reason) for row in refused)
        ids = [row["id"] for row in rows] + [row["id"] for row in refused]
        assert len(set(ids)) == len(ids)
        assert known is None or set(ids) == known
        known = {row["id"] for row in rows}
        summary = stage.summary
        assert (summary["rows"], summary["quarantined"]) == (len(rows), len(refused))


def test_report_json_has_the_keys_that_design_promises(finished_run):
    report = json.loads((finished_run.path / "report.json").read_text())
    assert report["target"] == finished_run.open(finished_run.path)[1].target.model
    assert (report["method"], report["num_heads"]) == ("medusa-1", 3)
    assert report["seeds"].keys() >= {"rows", "quarantined"}
    assert report["generate"].keys() >= {"rows", "tokens", "tokens_per_second"}
    assert report["features"].keys() >= {"positions", "bytes_per_position", "tokens_per_second"}
    assert report["train"].keys() >= {"tokens", "tokens_per_second", "final_loss"}
    assert len(report["heads"]) == 3 and all({"top1", "top5"} <= head.keys() for head in report["heads"])
    assert report["tree"].keys() >= {"nodes", "expected_acceleration_rate"}
    native = report["check"]["native"]
    speeds = {"acceleration_rate", "overhead", "speedup", "tokens_per_second", "baseline_tokens_per_second"}
    assert native.keys() >= speeds
    assert native["greedy_match"].keys() == {"sequences", "identical", "ties"}
    assert report.keys() >= {"hardware", "versions"}
    assert list(report["seconds_by_stage"]) == STAGES
    assert report["target_text"].keys() >= {"distinct_4", "mean_entropy_nats"}


def test_every_token_that_was_generated_has_one_cached_state(finished_run):
    report = json.loads((finished_run.path / "report.json").read_text())
    assert report["features"]["positions"] == report["generate"]["tokens"] > 0
    assert report["features"]["bytes_per_position"] > 0


def test_the_check_asked_held_out_prompts_and_every_answer_was_the_targets_own(finished_run):
    native = latest(finished_run, "check").summary["native"]
    asked = [row for path in latest(finished_run, "generate").shards() for row in read_rows(path)]
    assert native["prompts"] == native["greedy_match"]["sequences"] == sum(row["split"] == "check" for row in asked)
    assert native["greedy_match"]["identical"] + native["greedy_match"]["ties"] == native["prompts"]
    assert native["acceleration_rate"] >= 1
    assert native["speedup"] == pytest.approx(native["acceleration_rate"] / native["overhead"], rel=1e-3)


def test_the_same_command_again_keeps_everything_and_computes_nothing(copied_run, make_config, tmp_path, monkeypatch):
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("an engine was asked for")

    monkeypatch.setattr("pipeline.stages.generate.make_generation_engine", forbidden)
    monkeypatch.setattr("pipeline.stages.features.make_feature_engine", forbidden)
    before = {p: p.stat().st_mtime_ns for p in copied_run.path.rglob("*.parquet")}
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == [] and shards_made(run) == []
    assert {p: p.stat().st_mtime_ns for p in run.path.rglob("*.parquet")} == before


def test_run_yaml_gives_the_same_run_again(copied_run):
    _, config = RunDirectory.open(copied_run.path)
    config = config.model_copy(update={"run": config.run.model_copy(update={"root": copied_run.path.parent})})
    assert stages_run(run_again(config)) == []


@pytest.mark.parametrize(
    ("changes", "redone"),
    [
        ({"train__lr": 2e-2}, ["train", "calibrate", "export", "check"]),
        ({"calibrate__nodes": 5}, ["calibrate", "export", "check"]),
        ({"check__max_new_tokens": 10}, ["check"]),
        ({"train__checkpoint_every": 1, "limits__max_consecutive_failures": 9, "features__tokens_per_batch": 99}, []),
    ],
)
def test_a_changed_setting_redoes_its_stage_and_what_follows(copied_run, make_config, tmp_path, changes, redone):
    kept = {name: latest(copied_run, name).path for name in STAGES}
    run = run_again(make_config(tmp_path, **changes))
    assert stages_run(run) == redone
    for name in STAGES:
        assert (latest(run, name).path == kept[name]) == (name not in redone)
        assert kept[name].is_dir(), "nothing is overwritten"


def test_a_setting_changed_back_finds_the_old_result(copied_run, make_config, tmp_path):
    run_again(make_config(tmp_path, calibrate__nodes=5))
    assert stages_run(run_again(make_config(tmp_path))) == []
    assert latest(copied_run, "calibrate").summary["tree"]["nodes"] == 8


def test_runs_that_name_one_store_share_the_feature_cache(copied_run, make_config, tmp_path):
    recipe = make_config(tmp_path, run__name="recipe", run__store=str(copied_run.path), train__lr=3e-2)
    run = run_again(recipe)
    assert run.path == tmp_path / "recipe" and stages_run(run) == ["train", "calibrate", "export", "check"]
    assert latest(run, "features").path == latest(copied_run, "features").path
    assert latest(run, "train").path.parent == copied_run.path
    assert not list(run.path.glob("*-*")), "all stage directories are in the store"
    assert json.loads((run.path / "report.json").read_text())["run"]["name"] == "recipe"


def test_a_second_run_in_a_store_is_refused_while_the_first_is_in_the_same_stage(copied_run, make_config, tmp_path):
    recipe = make_config(tmp_path, run__name="recipe", run__store=str(copied_run.path), train__lr=3e-2)
    with latest(copied_run, "features").lock() as lock:
        lock.own()
        with pytest.raises(EnvironmentFault, match="holds the features stage"):
            run_again(recipe)
    assert stages_run(run_again(recipe))[0] == "train"


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
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == [name]
    if name != "seeds":  # which reads its sources from the beginning
        assert shards_made(run) == [(name, 2)]
    assert contents(run, *SHARDED) == before
    assert all(latest(run, other).verify() == [] for other in STAGES)


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
    other = run_again(make_config(tmp_path, run__name="other", generate__temperature=1.5), until="generate")
    ours, before = latest(copied_run, "generate"), contents(copied_run, "generate")
    shutil.copy(latest(other, "generate").shard_path(1), ours.shard_path(1))
    run = run_again(make_config(tmp_path))
    assert shards_made(run) == [("generate", 1)]
    assert contents(run, "generate") == before


@pytest.mark.parametrize("name", SHARDED)
def test_a_shard_of_another_run_beside_ours_is_named_and_never_read(copied_run, make_config, tmp_path, name):
    changes = {"seeds__holdout": 0.5, "generate__temperature": 1.5}
    other = run_again(make_config(tmp_path, run__name="other", **changes), until=name)
    foreign = latest(copied_run, name).shard_path(9)
    shutil.copy(latest(other, name).shard_path(0), foreign)
    with pytest.raises(DataError, match=f"another run.*{foreign}.*Delete this file") as caught:
        run_again(make_config(tmp_path, check__prompts=30))
    assert caught.value.exit_code == 3 and stages_run(copied_run) == []
    foreign.unlink()
    assert stages_run(run_again(make_config(tmp_path))) == []


def test_until_stops_after_a_stage_and_the_next_run_goes_on_from_there(make_config, tmp_path):
    run = run_again(make_config(tmp_path), until="generate")
    assert stages_run(run) == ["seeds", "generate"]
    assert run.latest("features") is None and not (run.path / "report.json").exists()
    run = run_again(make_config(tmp_path), until="features")
    assert stages_run(run) == ["features"]


def test_fresh_makes_a_stage_again_and_keeps_what_follows_when_it_is_the_same(copied_run, make_config, tmp_path):
    before = contents(copied_run, *SHARDED)
    run = run_again(make_config(tmp_path), fresh="features")
    assert stages_run(run) == ["features"]
    assert shards_made(run) == [("features", index) for index in range(4)]
    assert contents(run, *SHARDED) == before


def test_fresh_does_not_throw_away_what_another_run_is_working_on(copied_run, make_config, tmp_path):
    features = latest(copied_run, "features")
    with features.lock() as lock:
        lock.share()  # as a run does that trains from it
        with pytest.raises(EnvironmentFault, match="holds the features stage"):
            run_again(make_config(tmp_path), fresh="features")
    assert features.verify() == [] and len(features.shards()) == 4


def test_a_second_driver_is_refused_and_changes_nothing(copied_run, make_config, tmp_path):
    before = (copied_run.path / "run.yaml").read_text()
    with copied_run.locked(), pytest.raises(EnvironmentFault, match="holds the run 'run'"):
        run_again(make_config(tmp_path, train__lr=0.5))
    assert (copied_run.path / "run.yaml").read_text() == before


@pytest.mark.parametrize("option", ["until", "fresh"])
def test_a_stage_that_does_not_exist_is_named(make_config, tmp_path, option):
    with pytest.raises(ConfigError, match=r"no stage 'trian'.*seeds, generate, features, train"):
        run_again(make_config(tmp_path), **{option: "trian"})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["generate", "features"])
def test_an_interrupted_run_goes_on_with_the_pending_shards_and_ends_with_the_same_content(
    finished_run, make_config, tmp_path, monkeypatch, name
):
    from pipeline.stages import features, generate

    worker = {"generate": generate, "features": features}[name].Worker

    class InterruptedWorker(worker):  # type: ignore[valid-type, misc]
        def __call__(self, task):
            if task.index == 2:
                raise KeyboardInterrupt
            return super().__call__(task)

    with monkeypatch.context() as patched:
        patched.setattr(f"pipeline.stages.{name}.Worker", InterruptedWorker)
        with pytest.raises(KeyboardInterrupt):
            run_again(make_config(tmp_path))
    run = RunDirectory(tmp_path / "run")
    assert latest(run, name).done is None and sorted(latest(run, name).receipts()) == [0, 1]
    run = run_again(make_config(tmp_path))
    assert [index for stage, index in shards_made(run) if stage == name] == [2, 3]
    assert contents(run, *SHARDED) == contents(finished_run, *SHARDED)
    assert latest(run, name).summary["rows"] == latest(finished_run, name).summary["rows"]


def test_an_interrupted_training_goes_on_from_its_checkpoint_and_ends_with_the_same_weights(
    finished_run, copied_run, make_config, tmp_path, monkeypatch
):
    from safetensors.torch import load_file

    from pipeline.stages import train

    real, steps = train.train_medusa1, []

    def watched(spec, on_progress, stop_after=99):
        def on_step(step, *figures):
            steps.append(step)
            if step == stop_after:
                raise KeyboardInterrupt
            on_progress(step, *figures)

        return real(spec, on_progress=on_step)

    shutil.rmtree(latest(copied_run, "train").path)
    config = make_config(tmp_path, train__checkpoint_every=1)
    monkeypatch.setattr(train, "train_medusa1", lambda spec, on_progress: watched(spec, on_progress, stop_after=2))
    with pytest.raises(KeyboardInterrupt):
        run_again(config)
    monkeypatch.setattr(train, "train_medusa1", watched)
    run = run_again(config)
    assert steps == [1, 2, 3] and stages_run(run)[0] == "train"
    ours, theirs = (load_file(of.path / "latest/train/heads.safetensors") for of in (run, finished_run))
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())


def test_what_a_killed_writer_left_behind_is_swept_and_never_taken_for_a_shard(copied_run, make_config, tmp_path):
    stage = latest(copied_run, "generate")
    orphan = stage.path / "shards" / "00001.parquet.0123456789ab.tmp"
    orphan.write_bytes(stage.shard_path(1).read_bytes()[:100])
    assert stages_run(run_again(make_config(tmp_path))) == []
    assert not orphan.exists()


def test_the_split_and_the_number_of_shards_do_not_change_what_the_target_wrote(finished_run, make_config, tmp_path):
    run = run_again(make_config(tmp_path, seeds__rows_per_shard=17), until="generate")

    def rows(of: RunDirectory) -> dict[str, dict]:
        return {row["id"]: row for path in latest(of, "generate").shards() for row in read_rows(path)}

    assert len(latest(run, "generate").shards()) == 3
    assert rows(run) == rows(finished_run)


def test_a_run_that_was_copied_elsewhere_goes_on_there(copied_run, make_config, tmp_path):
    elsewhere = tmp_path / "far" / "away"
    shutil.copytree(copied_run.path, elsewhere / "run", symlinks=True)
    shutil.rmtree(copied_run.path)
    run = run_again(make_config(elsewhere))
    assert stages_run(run) == []
    assert latest(run, "features").path.parent == elsewhere / "run"


def test_a_store_that_lost_a_receipt_file_reads_it_from_the_shards_themselves(copied_run, make_config, tmp_path):
    stage = latest(copied_run, "generate")
    (stage.path / "DONE.json").unlink()
    assert all(read_receipt(path) for path in stage.shards())
    run = run_again(make_config(tmp_path))
    assert stages_run(run) == ["generate"] and shards_made(run) == []
    assert last_events(run)[-1]["event"] == "run-finished"


def test_another_target_behind_the_same_path_makes_everything_that_saw_it_anew(
    copied_run, make_config, tmp_path, tiny_target
):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    run = run_again(make_config(tmp_path, target__model=str(target)), until="features")
    assert stages_run(run) == [], "a target's content counts, not its path"
    config = json.loads((target / "generation_config.json").read_text())
    (target / "generation_config.json").write_text(json.dumps(config | {"temperature": 0.9, "do_sample": True}))
    run = run_again(make_config(tmp_path, target__model=str(target)), until="features")
    assert stages_run(run) == ["generate", "features"]


def test_one_run_s_settings_never_reach_into_the_target_s_directory(finished_run, tiny_target: Path):
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in tiny_target.iterdir()} - {"chat_template.jinja"} == names
