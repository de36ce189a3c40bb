"""Trackers, each read back with its own reader: every step once, also after a resume; a broken one
ends nothing.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import EnvironmentFault
from pipeline.training import trackers
from pipeline.training.phases import train
from pipeline.training.trackers import TRACKERS, require_trackers
from tests.flows.tiny import resolved
from tests.training.trainings import Stopped, stop_at

SETTINGS = {"train": {"lr": 0.01}, "seeds": {"sources": ["a", "b"]}}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")


def on_the_board(directory: Path) -> tuple[list[int], str]:
    """The steps of the loss, and all text, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory / "tensorboard"))
    board.Reload()
    texts = [
        event.tensor_proto.string_val[0].decode()
        for tag in board.Tags()["tensors"]
        for event in board.Tensors(tag)
    ]
    return [event.step for event in board.Scalars("loss")], "\n".join(texts)


def in_trackio() -> tuple[list[int], dict, str]:
    """The steps of the loss of the only run, its final figures, its name and configuration."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_run_records(trackers.PROJECT)
    points = SQLiteStorage.get_logs(trackers.PROJECT, run["name"])
    config = SQLiteStorage.get_run_config(trackers.PROJECT, run["name"])
    final = {
        name: value
        for point in points
        for name, value in point.items()
        if name.startswith("final/")
    }
    return (
        [point["step"] for point in points if "loss" in point],
        final,
        run["name"] + json.dumps(config),
    )


def records_of(file: Path) -> Iterator[bytes]:
    """A .wandb file is a log in LevelDB's format after 7 bytes: blocks of 32 KiB, in them parts of
    records, each after its checksum, length and type (1 whole, 2 first, 3 middle, 4 last)."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def in_wandb(directory: Path) -> tuple[list[int], dict, str]:
    """The same of the offline runs, which have one id."""
    from wandb.proto import wandb_internal_pb2

    steps, final, said, ids = [], {}, "", set()
    for file in sorted((directory / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                ids.add(record.run.run_id)
                said += record.run.display_name + str(record.run.config)
            items = {
                "/".join(item.nested_key) or item.key: item.value_json
                for item in record.history.item
            }
            if kind == "history" and "loss" in items:
                steps.append(record.history.step.num)
            final |= {
                "/".join(item.nested_key) or item.key: json.loads(item.value_json)
                for item in record.summary.update
            }
    assert len(ids) == 1
    return steps, final, said


@pytest.mark.slow
def test_every_tracker_has_every_step_once_after_a_resume_with_name_configuration_and_final_figures(
    make_spec, tmp_path, offline, caplog
):
    spec = make_spec(report_to=("tensorboard", "trackio", "wandb"))
    spec = replace(spec, run_name="my-run", configuration=SETTINGS)
    with pytest.raises(Stopped):
        train(
            spec, progress=stop_at(5)
        )  # the newest checkpoint is of step 3: 4 and 5 are taken again
    summary = train(spec)
    steps = list(range(1, summary["steps"] + 1))
    assert len(steps) > 6 and "warnings" not in summary
    taken, text = on_the_board(spec.path)
    assert taken == steps and not caplog.records, "TensorBoard has purged nothing"
    assert (
        "my-run" in text
        and '"lr": 0.01' in text
        and f'"final_loss": {summary["final_loss"]}' in text
    )
    for taken, final, said in (in_trackio(), in_wandb(spec.path)):
        assert taken == steps
        assert final["final/final_loss"] == pytest.approx(summary["final_loss"]) and final[
            "final/steps"
        ] == len(steps)
        assert "my-run" in said and "0.01" in said and "sources" in said


@pytest.mark.parametrize("broken", ["begin", "log", "finish"])
def test_a_tracker_that_fails_is_said_once_and_ends_neither_training_nor_the_others(
    make_spec, monkeypatch, caplog, broken
):
    asked = []

    class Broken:
        package = "broken"
        begin = log = finish = lambda self, *arguments: None

    def fail(self, *arguments):
        asked.append(broken)
        raise ConnectionError("the server\nis gone")

    setattr(Broken, broken, fail)
    monkeypatch.setitem(TRACKERS, "wandb", Broken)
    plain = train(make_spec("plain"))
    spec = make_spec(report_to=("wandb", "tensorboard"))
    summary = train(spec)
    assert (
        summary["final_loss"] == plain["final_loss"]
        and len(on_the_board(spec.path)[0]) >= summary["steps"]
    )
    (said,) = summary["warnings"]
    assert said == "wandb was given up and has not all points: ConnectionError: the server is gone"
    assert asked == [broken] and [record.message for record in caplog.records] == [
        f"{said}. Training goes on."
    ], "once"


def test_a_tracker_that_is_not_there_or_not_logged_in_is_refused_before_anything_starts(
    make_config, tmp_path, monkeypatch
):
    from pipeline.run.checks import check_plan, check_run

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    import wandb

    wandb.teardown()
    with pytest.raises(
        EnvironmentFault, match=r"Nobody is logged in to Weights & Biases .train.report_to.*login"
    ):
        check_run(resolved(make_config(tmp_path, train__report_to=["wandb"])))
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    check_run(resolved(make_config(tmp_path, train__report_to=["wandb"])))
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(EnvironmentFault, match="Space me/space, and nobody is logged in"):
        require_trackers(["trackio"])
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(
        EnvironmentFault,
        match=r"trackio is not installed here .train.report_to.*pip install trackio",
    ):
        check_run(resolved(make_config(tmp_path, train__report_to=["trackio"])))
    notes: list[str] = []
    notes = check_plan(resolved(make_config(tmp_path, train__report_to=["trackio"])))
    assert len(notes) == 1 and "trackio" in notes[0]


@pytest.mark.slow
def test_a_server_that_answers_no_more_does_not_keep_the_heads_from_being_written(
    tmp_path, offline, monkeypatch
):
    import wandb

    told, init = {}, wandb.init
    monkeypatch.setattr(wandb, "init", lambda **more: told.update(more) or init(**more))
    reporting = trackers.Trackers(["wandb"], trackers.Watched("run", tmp_path))
    reporting.finish({})
    assert (
        not reporting.failed
        and 0 < told["settings"].finish_timeout < 600 > told["settings"].init_timeout > 0
    )
    assert told["settings"].finish_timeout_raises, "so that it is told"


def test_nothing_is_imported_that_is_not_asked_for():
    code = (
        "import sys; from pathlib import Path; from pipeline.training.trackers import Trackers,"
        " Watched\nTrackers((), Watched('run', Path('.'))).finish({})\nprint(sorted({'wandb',"
        " 'trackio', 'tensorboard', 'torch.utils.tensorboard'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]" and not Path(trackers.FILE).exists()


def test_where_to_report_changes_no_fingerprint(make_spec):
    told, not_told = make_spec("a", report_to=("trackio",)), make_spec("b", report_to=())
    assert told.method.settings(told.settings, None) == not_told.method.settings(
        not_told.settings, None
    )
