"""metrics.jsonl, and each tracker read back with its own reader."""

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
from pipeline.training import metrics as room
from pipeline.training.metrics import (
    FILE,
    TRACKERS,
    TRACKING_FILE,
    MetricsLog,
    read_curves,
    read_metrics,
    require_trackers,
)
from pipeline.training.trainer import train
from tests.flows.tiny import resolved
from tests.training.trainings import Stopped, stop_at


def write(directory: Path, step: int, *steps: int) -> None:
    with MetricsLog(directory, step) as log:
        for number in steps:
            log.write(number, {"loss": float(number), "head_losses": [1.0, 2.0]})


def steps_in(directory: Path) -> list[int]:
    return [line["step"] for line in read_metrics(directory)]


def test_a_resume_drops_what_it_will_write_again(tmp_path):
    write(tmp_path, 0, 0, 1, 2, 3, 4)
    write(tmp_path, 2, 3, 4, 5)
    assert steps_in(tmp_path) == [0, 1, 2, 3, 4, 5]
    write(tmp_path, 0, 0, 1)
    assert steps_in(tmp_path) == [0, 1]


def test_a_worker_that_outlived_its_driver_cannot_append(tmp_path):
    with MetricsLog(tmp_path, 0) as orphan:
        orphan.write(1, {"loss": 1.0})
        with MetricsLog(tmp_path, 1) as log:
            orphan.write(2, {"loss": 9.0})
            log.write(2, {"loss": 2.0})
            orphan.write(3, {"loss": 9.0})
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 2.0]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
    write(tmp_path, 0, 1, 2)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 3, "lo')
    assert steps_in(tmp_path) == [1, 2]


def test_the_reports_curves_are_per_head_by_step(tmp_path):
    drift = {"kl": 0.01, "positions": 9}
    with MetricsLog(tmp_path, 0) as log:
        log.write(0, {"held_out": [{"loss": 3.0, "top1": 0.1}, {"loss": 4.0, "top1": 0.2}]})
        log.write(1, {"loss": 2.0, "head_losses": [1.0, 2.0]})
        log.write(2, {"loss": 1.0, "held_out": [{"loss": 1.0}, {"loss": 2.0}], "drift": drift})
    trained, held_out = read_curves(tmp_path)
    assert [(line["step"], line["loss"]) for line in trained] == [(1, 2.0), (2, 1.0)]
    assert held_out == [
        {"step": 0, "head_losses": [3.0, 4.0], "head_top1": [0.1, 0.2]},
        {"step": 2, "head_losses": [1.0, 2.0], "head_top1": [None, None], "kl": 0.01},
    ]


def test_a_figure_that_is_no_number_is_never_written(tmp_path):
    with pytest.raises(ValueError), MetricsLog(tmp_path, 0) as log:
        log.write(1, {"loss": float("nan")})


@pytest.fixture
def offline(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")


def read_tensorboard(directory: Path) -> tuple[list[int], dict[str, float], str]:
    """The steps of the loss, the last value of each scalar, and all text."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(directory / "tensorboard")).Reload()
    last = {tag: board.Scalars(tag)[-1].value for tag in board.Tags()["scalars"]}
    text = ""
    for tag in board.Tags()["tensors"]:
        for event in board.Tensors(tag):
            text += event.tensor_proto.string_val[0].decode() + "\n"
    return [event.step for event in board.Scalars("loss")], last, text


def read_trackio() -> tuple[list[int], dict, str]:
    """The steps of the loss of the only run, all last values, its name and configuration."""
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_run_records(room.PROJECT)
    steps, last = [], {}
    for point in SQLiteStorage.get_logs(room.PROJECT, run["name"]):
        last.update(point)
        if "loss" in point:
            steps.append(point["step"])
    config = SQLiteStorage.get_run_config(room.PROJECT, run["name"])
    return steps, last, run["name"] + json.dumps(config)


def records_of(file: Path) -> Iterator[bytes]:
    """A .wandb file is a log in LevelDB's format after 7 bytes: blocks of 32 KiB, in them parts of
    records, each after its checksum, length and type (1 whole, 2 first, 3 middle, 4 last)."""
    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def read_wandb(directory: Path) -> tuple[list[int], dict, str]:
    """The same of the offline runs, which have one id."""
    from wandb.proto import wandb_internal_pb2

    steps, last, text, ids = [], {}, "", set()
    for file in sorted((directory / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                text += record.run.display_name + str(record.run.config)
            for item in record.history.item:
                if "/".join(item.nested_key) == "loss" or item.key == "loss":
                    steps.append(record.history.step.num)
            for item in record.summary.update:
                last["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    assert len(ids) == 1
    return steps, last, text


@pytest.mark.slow
def test_every_tracker_has_every_step_once_after_a_resume(make_spec, offline, caplog):
    spec = make_spec(report_to=("tensorboard", "trackio", "wandb"))
    configuration = {"train": {"lr": 0.01}, "seeds": {"sources": ["a", "b"]}}
    spec = replace(spec, run_name="my-run", configuration=configuration)
    with pytest.raises(Stopped):
        train(spec, progress=stop_at(5))  # steps 4 and 5 are taken again
    result = train(spec)
    steps = list(range(1, result.steps + 1))
    assert len(steps) > 6 and not result.warnings
    found, last, text = read_tensorboard(spec.path)
    assert found == steps and not caplog.records, "TensorBoard has purged nothing"
    assert last["held_out/head_1/top1"] == pytest.approx(result.held_out[1]["top1"])
    assert "my-run" in text and '"lr": 0.01' in text
    assert f'"final_loss": {result.final_loss}' in text
    for found, last, text in (read_trackio(), read_wandb(spec.path)):
        assert found == steps and last["final/steps"] == len(steps)
        assert last["final/final_loss"] == pytest.approx(result.final_loss)
        assert "my-run" in text and "0.01" in text and "sources" in text


@pytest.mark.parametrize("broken", ["begin", "log", "finish"])
def test_a_failing_tracker_stops_neither_training_nor_the_others(
    make_spec, monkeypatch, caplog, broken
):
    calls = []

    class Broken:
        package = "broken"
        begin = log = finish = lambda self, *arguments: None

    def fail(self, *arguments):
        calls.append(broken)
        raise ConnectionError("the server\nis gone")

    setattr(Broken, broken, fail)
    monkeypatch.setitem(TRACKERS, "wandb", Broken)
    expected = train(make_spec("plain")).final_loss
    spec = make_spec(report_to=("wandb", "tensorboard"))
    result = train(spec)
    assert result.final_loss == expected and calls == [broken]
    assert read_tensorboard(spec.path)[0] == list(range(1, result.steps + 1))
    (warning,) = result.warnings
    assert "wandb" in warning and "ConnectionError: the server is gone" in warning
    assert len(caplog.records) == 1 and warning in caplog.text


def test_a_missing_tracker_or_login_is_refused_beforehand(make_config, tmp_path, monkeypatch):
    import wandb

    from pipeline.run.checks import check_plan, check_run

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    wandb.teardown()
    refusal = pytest.raises(EnvironmentFault, match=r"train\.report_to")
    with refusal:
        require_trackers(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()
    require_trackers(["wandb"])
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/space")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with refusal:
        require_trackers(["trackio"])
    monkeypatch.setitem(sys.modules, "trackio", None)
    with refusal:
        check_run(resolved(make_config(tmp_path, train__report_to=["trackio"])))
    (note,) = check_plan(resolved(make_config(tmp_path, train__report_to=["trackio"])))
    assert "trackio" in note


@pytest.mark.slow
def test_an_unreachable_server_delays_the_heads_by_minutes_at_most(tmp_path, offline, monkeypatch):
    import wandb

    given, init = {}, wandb.init

    def spy(**arguments):
        given.update(arguments)
        return init(**arguments)

    monkeypatch.setattr(wandb, "init", spy)
    with MetricsLog(tmp_path, 0, report_to=["wandb"]) as log:
        assert log.finish({}) == []
    settings = given["settings"]
    assert 0 < settings.init_timeout < 600 and 0 < settings.finish_timeout < 600
    assert settings.finish_timeout_raises


def test_no_tracker_is_imported_unasked(tmp_path):
    code = (
        "import sys; from pathlib import Path; from pipeline.training.metrics import MetricsLog\n"
        f"MetricsLog(Path({str(tmp_path)!r}), 0).finish()\n"
        "print(sorted({'wandb', 'trackio', 'tensorboard'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]" and not (tmp_path / TRACKING_FILE).exists()
