"""How a training ends: interrupted, killed, on two workers, a second time; and what it leaves."""

from __future__ import annotations

import json
import os
import signal
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.errors import DataError
from pipeline.execution.progress import ProgressReporter
from pipeline.training import trainer as room
from pipeline.training.metrics import read_metrics
from pipeline.training.phases import train
from pipeline.training.task import TrainSpec
from tests.forks import FORKS, PATIENCE
from tests.training.trainings import Stopped, stop_at
from tests.training.two_workers import train_as_two

ROOT = Path(__file__).parents[2]


def weights(spec: TrainSpec) -> dict[str, torch.Tensor]:
    return load_file(spec.heads_path)


RECIPES = [
    {"optimizer": "adamw"},
    {"optimizer": "adamw-8bit"},
    {"soft_labels": 0.5},
    {"lm_head": "shared", "soft_labels": 0.5},
    {"noise": 0.2},
    {"lm_head": "shared", "optimizer": "adamw-8bit"},
    {"heads": "recurrent", "soft_labels": 0.5},
]


@pytest.mark.parametrize(
    "recipe",
    [RECIPES[0], *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in RECIPES[1:])],
    ids=str,
)
def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(make_spec, recipe):
    whole = make_spec("whole", **recipe)
    expected = train(whole)
    for stop in (1, 3, 7):
        broken = make_spec(f"broken-{stop}", **recipe)
        with pytest.raises(Stopped):
            train(broken, progress=stop_at(stop))
        assert not broken.heads_path.exists()
        found = train(broken)
        assert found["steps"] == expected["steps"] > 7 and found["tokens"] == expected["tokens"]
        assert (
            found["final_loss"] == expected["final_loss"]
            and found["held_out"] == expected["held_out"]
        )
        for name, tensor in weights(whole).items():
            assert torch.equal(weights(broken)[name], tensor), f"{name}, stopped at {stop}"


def test_metrics_have_every_step_once_after_a_resume(make_spec):
    whole, broken = make_spec("whole"), make_spec("broken")
    train(whole)
    for stop in (2, 5):
        with pytest.raises(Stopped):
            train(broken, progress=stop_at(stop))
    total = train(broken)["steps"]
    lines = list(read_metrics(broken.path))
    assert [line["step"] for line in lines] == list(range(total + 1))
    for line, expected in zip(lines, read_metrics(whole.path), strict=True):
        assert line | {"tokens_per_second": 0} == expected | {"tokens_per_second": 0}


def train_until_killed(spec: TrainSpec) -> None:
    train(
        spec,
        progress=ProgressReporter(
            show=lambda now: now.done == 8 and os.kill(os.getpid(), signal.SIGKILL)
        ),
    )


@pytest.mark.slow
def test_a_killed_process_resumes_from_its_newest_whole_checkpoint(make_spec):
    whole, killed = make_spec("whole"), make_spec("killed")
    train(whole)
    trainer = FORKS.Process(target=train_until_killed, args=(killed,))
    trainer.start()
    trainer.join(PATIENCE)
    assert trainer.exitcode == -signal.SIGKILL
    assert list(killed.path.glob("checkpoints/step-*.safetensors"))
    train(killed)
    assert all(
        torch.equal(weights(killed)[name], tensor) for name, tensor in weights(whole).items()
    )


def test_a_finished_run_called_again_does_nothing(make_spec):
    spec = make_spec()
    summary = train(spec)
    before = {path: path.stat().st_mtime_ns for path in spec.path.rglob("*")}
    assert train(spec, progress=stop_at(1)) == summary
    assert {path: path.stat().st_mtime_ns for path in spec.path.rglob("*")} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", [{}, {"soft_labels": 0.5, "lm_head": "shared", "noise": 0.2}], ids=str
)
def test_two_workers_follow_the_curve_of_one(make_spec, tmp_path, recipe):
    """The second worker is another process; they meet over gloo."""
    alone, together = make_spec("alone", **recipe), make_spec("together", **recipe)
    train(alone)
    train_as_two(train, together, tmp_path)
    for one, two in zip(read_metrics(alone.path), read_metrics(together.path), strict=True):
        assert one["step"] == two["step"] and one.get("tokens") == two.get("tokens")
        assert two.get("loss", 0) == pytest.approx(one.get("loss", 0), rel=1e-4)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(together)[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("lm_head", ["untied", "shared", "tied"])
def test_the_same_training_on_a_slower_machine_leaves_the_same_file(
    make_spec, monkeypatch, lm_head
):
    fast, slow = make_spec("fast", lm_head=lm_head), make_spec("slow", lm_head=lm_head)
    train(fast)
    monkeypatch.setattr(room, "time", SimpleNamespace(monotonic=count(0, 60).__next__))
    summary = train(slow)
    assert summary["seconds"] >= 60 * summary["steps"]
    assert fast.heads_path.read_bytes() == slow.heads_path.read_bytes()


def test_heads_of_another_shape_in_the_directory_do_not_pass_for_this_training_s(make_spec):
    train(make_spec(num_heads=2))
    with pytest.raises(
        DataError, match=r"2 heads with untied lm_heads.*3 heads with untied lm_heads"
    ):
        train(make_spec())


def test_the_trained_heads_say_what_they_are(make_spec):
    spec = make_spec(num_heads=2, num_layers=2)
    summary = train(spec)
    heads = read_trained_heads(spec.heads_path)
    assert (heads.shape.num_heads, heads.shape.num_layers, heads.shape.lm_head) == (2, 2, "untied")
    assert json.loads(json.dumps(summary)) == summary and os.path.getsize(spec.heads_path) > 0
    spec.heads_path.write_bytes(spec.heads_path.read_bytes()[:100])
    with pytest.raises(DataError, match="damaged"):
        read_trained_heads(spec.heads_path)
