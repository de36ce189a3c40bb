"""metrics.jsonl, and each tracker read back with its own reader."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import EnvironmentFault
from pipeline.training.metrics import (
    FILE,
    TRACKERS,
    MetricsLog,
    read_metrics,
    require_trackers,
)
from pipeline.training.task import TrainSpec
from pipeline.training.trainer import train
from tests.flows.tiny import resolved
from tests.training.trainings import Stopped, stop_at


def write(spec: TrainSpec, step: int, *steps: int) -> None:
    with MetricsLog(spec, step) as log:
        for number in steps:
            log.write(number, {"loss": float(number)})


def steps_in(spec: TrainSpec) -> list[int]:
    return [line["step"] for line in read_metrics(spec.path)]


def test_a_resume_drops_what_it_will_write_again(make_spec):
    spec = make_spec()
    write(spec, 0, 0, 1, 2, 3, 4)
    with (spec.path / FILE).open("a") as file:
        file.write('{"step": 5, "lo')  # cut short by a kill
    write(spec, 2, 3, 4, 5)
    assert steps_in(spec) == [0, 1, 2, 3, 4, 5]
    write(spec, 0, 0, 1)
    assert steps_in(spec) == [0, 1]


def test_a_worker_that_outlived_its_driver_cannot_append(make_spec):
    spec = make_spec()
    with MetricsLog(spec, 0) as orphan:
        orphan.write(1, {"loss": 1.0})
        with MetricsLog(spec, 1) as log:
            orphan.write(2, {"loss": 9.0})
            log.write(2, {"loss": 2.0})
    assert [line["loss"] for line in read_metrics(spec.path)] == [1.0, 2.0]


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")


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


@pytest.fixture
def wandb_runs(monkeypatch):
    """Runs of Weights & Biases, offline, and the steps whose loss they were given."""
    import wandb

    runs, steps, init = [], [], wandb.init

    def spy(**arguments):
        run = init(**arguments)

        def record(numbers, step):
            steps.append(step)
            run.log(numbers, step=step)

        runs.append(SimpleNamespace(id=run.id, log=record, summary={}, finish=run.finish))
        return runs[-1]

    monkeypatch.setattr(wandb, "init", spy)
    return runs, steps


@pytest.mark.slow
def test_every_tracker_has_every_step_once_after_a_resume(make_spec, offline, wandb_runs):
    spec = make_spec(report_to=("tensorboard", "wandb"))
    spec = replace(spec, run_name="my-run", configuration={"train": {"lr": 0.01}})
    with pytest.raises(Stopped):
        train(spec, progress=stop_at(5))  # steps 4 and 5 are taken again
    result = train(spec)
    steps = list(range(1, result.steps + 1))
    assert len(steps) > 6 and not result.warnings
    found, last, text = read_tensorboard(spec.path)
    assert found == steps
    assert last["held_out/head_1/top1"] == pytest.approx(result.held_out[1]["top1"])
    assert '"lr": 0.01' in text
    assert f'"final_loss": {result.final_loss}' in text
    runs, found = wandb_runs
    assert [step for step in found if step] == steps and len({run.id for run in runs}) == 1
    assert runs[-1].summary["final/final_loss"] == result.final_loss


@pytest.mark.parametrize("broken", ["begin", "log", "finish"])
def test_a_failing_tracker_stops_neither_training_nor_the_others(
    make_spec, monkeypatch, caplog, broken
):
    calls = []

    class Broken:
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

    from pipeline.run.checks import check_run

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
    monkeypatch.setitem(sys.modules, "wandb", None)
    with refusal:
        check_run(resolved(make_config(tmp_path, train__report_to=["wandb"])))
