"""A signal ends a run politely: its exit code, what to do next, and nothing to do twice."""

from __future__ import annotations

import shutil
import signal

import pytest
import yaml
from rich.console import Console

from pipeline.flow import run_flow
from pipeline.storage.run_directory import RunDirectory
from tests.faults.processes import Waiting
from tests.flows.tiny import SHARDED, contents, latest, run_again, shards_made, stages_run


@pytest.mark.fault
@pytest.mark.parametrize(
    ("sent", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)],
    ids=lambda value: str(value),
)
def test_a_signal_keeps_what_was_committed_and_the_same_command_continues(
    finished_run, make_settings, make_config, tmp_path, sent, code
):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(make_settings(tmp_path)))
    driver = Waiting(tmp_path / "run.yaml", tmp_path / "said.txt", "generate")
    assert driver.is_at("generate")
    driver.send(sent)
    ended, said = driver.end()
    assert ended == code
    if code > 0:
        stopped = said.splitlines()[-1]
        assert (
            stopped.startswith("stopped: ")
            and sent.name in stopped
            and "the same command continues" in stopped
        )
        assert "Traceback" not in said
    run = RunDirectory(tmp_path / "run")
    assert list(run.latest("generate").receipts()) == [0]
    run = run_flow(
        make_config(tmp_path), until="generate", executor="inline", console=Console(quiet=True)
    )
    assert shards_made(run) == [("generate", index) for index in (1, 2, 3)]
    assert contents(run, "seeds", "generate") == contents(finished_run, "seeds", "generate")


@pytest.mark.slow
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

    from pipeline.execution.progress import ProgressReporter
    from pipeline.stages import train

    real, steps = train.train, []

    def watched(spec, progress, stop_after=99):
        def show(now):
            steps.append(now.done)
            if now.done == stop_after:
                raise KeyboardInterrupt

        return real(spec, progress=ProgressReporter(show=show))

    shutil.rmtree(latest(copied_run, "train").path)
    config = make_config(tmp_path, train__checkpoint_every=1)
    monkeypatch.setattr(
        train, "train", lambda spec, progress: watched(spec, progress, stop_after=2)
    )
    with pytest.raises(KeyboardInterrupt):
        run_again(config)
    monkeypatch.setattr(train, "train", watched)
    run = run_again(config)
    assert steps == [0, 1, 2, 2, 3] and stages_run(run)[0] == "train"
    ours, theirs = (
        load_file(of.path / "latest/train/heads.safetensors") for of in (run, finished_run)
    )
    assert all((ours[name] == tensor).all() for name, tensor in theirs.items())
