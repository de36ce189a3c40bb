"""A training, interrupted and started a second time; its best state."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

from pipeline.artifacts.json_form import from_json
from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.conversations.spans import IGNORED
from pipeline.errors import StoppedAtCheckpoint
from pipeline.execution.progress import SILENT, Progress, ProgressReporter
from pipeline.training import checkpoints
from pipeline.training.checkpoints import read_checkpoint
from pipeline.training.feature_batches import Batch
from pipeline.training.held_out_accuracy import Evaluation
from pipeline.training.metrics import flatten_metrics, read_metrics
from pipeline.training.task import TrainResult, TrainSpec, Workers
from pipeline.training.trainer import StepResult, Trainer, TrainState, train
from tests.flows.tiny import changed_at
from tests.training.trainings import Stopped, same_curve, same_weights, stop_at, trainer_of
from tests.training.two_workers import train_as_two

RECIPES = [
    {},
    {"lm_head": "shared", "optimizer": "adamw-8bit", "noise": 0.2},
    {"heads": "recurrent", "soft_labels": 0.5},
    {"heads": "eagle3", "soft_labels": 0.5, "noise": 0.1},
]


@pytest.mark.parametrize(
    "recipe",
    [RECIPES[0], *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in RECIPES[1:])],
    ids=str,
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(make_spec, recipe):
    whole = make_spec("whole", **recipe)
    expected = train(whole)
    for stop in (1, 3, 7):
        broken = make_spec(f"broken-{stop}", **recipe)
        with pytest.raises(Stopped):
            train(broken, progress=stop_at(stop))
        assert not broken.heads_path.exists()
        found = train(broken)
        assert found.steps == expected.steps > 7 and found.tokens == expected.tokens
        assert found.final_loss == expected.final_loss and found.held_out == expected.held_out
        assert same_weights(whole, broken), stop
        assert same_curve(whole.path, broken.path), stop


@pytest.mark.parametrize("after", [0, 3])
def test_a_training_asked_to_stop_keeps_every_step(make_spec, after):
    def show(now: Progress) -> None:
        if now.done == after:
            progress.ask_to_stop()

    progress = ProgressReporter(show=show)
    whole, asked = (make_spec(name, checkpoint_every=None) for name in ("whole", "asked"))
    train(whole)
    with pytest.raises(
        StoppedAtCheckpoint, match=f"step {after} of" if after else "before its first"
    ):
        train(asked, progress=progress)
    saved = [path.name for path in (asked.path / "checkpoints").glob("step-*")]
    assert saved == ([f"step-{after:08d}.safetensors"] if after else [])
    train(asked)
    assert whole.heads_path.read_bytes() == asked.heads_path.read_bytes()
    assert same_curve(whole.path, asked.path)


def stop_first_worker(spec: TrainSpec, workers: Workers) -> None:
    """Ask only the first worker, which alone has the reporter."""
    progress = SILENT
    if workers.is_first:
        progress = ProgressReporter(show=lambda now: now.done == 2 and progress.ask_to_stop())
    with pytest.raises(StoppedAtCheckpoint, match="step 2 of"):
        train(spec, workers, progress)


@pytest.mark.slow
def test_all_workers_stop_after_the_same_step(make_spec, tmp_path):
    spec = make_spec(checkpoint_every=None)
    train_as_two(stop_first_worker, spec, tmp_path)
    assert [path.name for path in (spec.path / "checkpoints").iterdir()] == [
        "step-00000002.safetensors"
    ]


def test_a_finished_run_called_again_does_nothing(make_spec):
    spec = make_spec()
    result = train(spec)
    assert from_json(TrainResult, json.loads(json.dumps(result.to_json()))) == result
    before = changed_at(spec.path)
    assert train(spec, progress=stop_at(1)) == result
    assert changed_at(spec.path) == before


class TwoThreads(Workers):
    """A worker that runs in a thread beside the other one, and sums as torch.distributed does."""

    both = threading.Barrier(2, timeout=60)
    parts: ClassVar[dict[int, torch.Tensor]] = {}

    def sum_in_place(self, tensor: torch.Tensor) -> None:
        self.parts[self.rank] = tensor.clone()
        self.both.wait()
        tensor.copy_(self.parts[0] + self.parts[1])
        self.both.wait()


def part_of(batch: Batch, chosen_N: torch.Tensor) -> Batch:
    labels_KN = batch.labels_KN[:, chosen_N]
    return Batch(batch.hidden_ND[chosen_N], batch.next_N[chosen_N], labels_KN, *batch[3:])


def figures_of(step: StepResult, evaluation: Evaluation) -> dict[str, float]:
    return dict(flatten_metrics({**step.metrics, "held_out": evaluation.held_out}))


def test_unequal_workers_step_as_one_on_the_whole_batch(make_spec):
    """One worker has no label of the last head; all its spans end before."""
    spec = make_spec(batch_tokens=10_000, max_grad_norm=1e9)
    alone = trainer_of(spec)
    batch = next(alone.learner.steps(0))[0]
    expected, held_out = alone.step(0, [batch]), alone.evaluate(TrainState())

    is_short_N = batch.labels_KN[2] == IGNORED
    assert 0 < 2 * is_short_N.sum() < len(is_short_N)
    trainers = [trainer_of(spec, TwoThreads(rank, 2)) for rank in range(2)]
    shares = [[part_of(batch, is_short_N)], [part_of(batch, ~is_short_N)]]
    with ThreadPoolExecutor(2) as threads:
        steps = list(threads.map(Trainer.step, trainers, (0, 0), shares))
        evaluations = list(threads.map(Trainer.evaluate, trainers, (TrainState(), TrainState())))
    for trainer, step, found in zip(trainers, steps, evaluations, strict=True):
        assert step.positions == expected.positions == len(is_short_N)
        assert figures_of(step, found) == pytest.approx(figures_of(expected, held_out), rel=1e-5)
        for ours, whole in zip(trainer.parameters, alone.parameters, strict=True):
            torch.testing.assert_close(ours.grad, whole.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_tokens", [1, 60])
def test_workers_with_whole_rows_step_as_one(make_spec, batch_tokens):
    """Steps of one row leave nothing to one of the workers."""
    spec = make_spec(heads="eagle3", noise=0.2, soft_labels=0.5, batch_tokens=batch_tokens)
    alone = trainer_of(spec)
    expected = alone.step(0, next(alone.learner.steps(0)))
    trainers = [trainer_of(spec, TwoThreads(rank, 2)) for rank in range(2)]
    shares = [next(trainer.learner.steps(0)) for trainer in trainers]
    assert (0 in [len(batch.next_N) for (batch,) in shares]) == (batch_tokens == 1)
    with ThreadPoolExecutor(2) as threads:
        steps = list(threads.map(Trainer.step, trainers, (0, 0), shares))
    for trainer, step in zip(trainers, steps, strict=True):
        assert step.positions == expected.positions
        assert step.loss == pytest.approx(expected.loss, rel=1e-5)
        for ours, whole in zip(trainer.parameters, alone.parameters, strict=True):
            torch.testing.assert_close(ours.grad, whole.grad, rtol=1e-4, atol=1e-6)


def evaluations(spec: TrainSpec) -> dict[int, float]:
    """Head 0's held-out loss by step."""
    lines = read_metrics(spec.path)
    return {line["step"]: line["held_out"][0]["loss"] for line in lines if "held_out" in line}


@pytest.fixture
def best(make_spec, monkeypatch) -> int:
    """Make a state in the middle of `make_spec`'s training the best; return its step."""
    plain = make_spec("plain", epochs=5)
    train(plain)
    found = evaluations(plain)
    step = sorted(found)[2]

    def loss(evaluation: Evaluation, decay: float) -> float:
        return abs(evaluation.held_out[0]["loss"] - found[step])

    monkeypatch.setattr(Evaluation, "loss", loss)
    assert 0 < step < max(found)
    return step


def test_the_best_state_is_written_not_the_last(make_spec, best, monkeypatch):
    monkeypatch.setattr(checkpoints, "KEPT", 100)
    spec = make_spec(epochs=5, patience=100, checkpoint_every=1)
    result = train(spec)
    assert result.best_step == best < result.steps == max(evaluations(spec))
    assert result.held_out[0]["loss"] == evaluations(spec)[best]
    stopped = train(make_spec("stopped", epochs=5, patience=2))
    later = [step for step in sorted(evaluations(spec)) if step > best]
    assert stopped.steps == later[1] and stopped.best_step == best
    found = read_checkpoint(spec.path / "checkpoints" / f"step-{best:08d}.safetensors")
    for name, weight in read_trained_heads(spec.heads_path).named_parameters():
        assert torch.equal(found.tensors[f"modules/heads.{name}"], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("after", [-1, 0, 1])
def test_a_resume_around_the_best_state_ends_with_it(make_spec, best, after):
    whole = make_spec("whole", epochs=5, patience=100)
    broken = make_spec("broken", epochs=5, patience=100, checkpoint_every=1)
    train(whole)
    with pytest.raises(Stopped):
        train(broken, progress=stop_at(best + after))
    assert train(broken).best_step == best
    assert whole.heads_path.read_bytes() == broken.heads_path.read_bytes()


@pytest.mark.parametrize("loss", [1.0, 1.5, math.nan])
def test_only_a_lower_loss_makes_a_later_state_the_best(loss):
    state, first = TrainState(), Evaluation([], {})
    assert state.record(first, 1.0)
    state.advance(0.0, 1, 1.0)
    assert not state.record(Evaluation([], {"top1": 0.1}), loss)
    assert (state.best_step, state.best_loss, state.stale) == (0, 1.0, 1)
    assert state.evaluation is first


def test_where_nothing_is_held_out_the_last_state_is_kept(make_spec, monkeypatch):
    usual = make_spec("usual")
    train(usual)
    monkeypatch.setattr("pipeline.training.heads_only.SPLIT", "nothing")
    spec = make_spec("alone", patience=1)
    with pytest.raises(Stopped):
        train(spec, progress=stop_at(5))
    result = train(spec)
    assert result.best_step is None and result.held_out == [] and result.frequency == {}
    assert spec.heads_path.read_bytes() == usual.heads_path.read_bytes()
