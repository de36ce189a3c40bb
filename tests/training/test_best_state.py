"""The state that is written is the best on held-out text, and training ends where that gains
nothing.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.training.checkpoints import read_checkpoint
from pipeline.training.learner import Learner
from pipeline.training.metrics import read_metrics
from pipeline.training.phases import train
from pipeline.training.task import TrainSpec
from pipeline.training.train_state import TrainState
from tests.training.trainings import Stopped, stop_at


def evaluations(spec: TrainSpec) -> dict[int, float]:
    """Head 0's held-out loss by step."""
    return {
        line["step"]: line["held_out"][0]["loss"]
        for line in read_metrics(spec.path)
        if "held_out" in line
    }


@pytest.fixture
def one_in_the_middle_is_best(make_spec, monkeypatch) -> int:
    """Held-out text says that a state in the middle of `make_spec`'s training is best; its step."""
    plain = make_spec("plain", epochs=5)
    train(plain)
    found = evaluations(plain)
    best = sorted(found)[2]

    def loss(learner: Learner, figures: dict[str, Any]) -> float:
        return abs(figures["held_out"][0]["loss"] - found[best])

    monkeypatch.setattr(Learner, "held_out_loss", loss)
    assert 0 < best < max(found)
    return best


def test_the_best_state_is_written_not_the_last(make_spec, one_in_the_middle_is_best):
    spec = make_spec(epochs=5, patience=100, checkpoint_every=1, keep_checkpoints=100)
    summary = train(spec)
    best, last = one_in_the_middle_is_best, max(evaluations(spec))
    assert summary["best_step"] == best < last == summary["steps"]
    assert summary["held_out"][0]["loss"] == evaluations(spec)[best]
    stopped = make_spec("stopped", epochs=5, patience=100, checkpoint_every=best)
    with pytest.raises(Stopped):
        train(stopped, progress=stop_at(best))
    (path,) = (stopped.path / "checkpoints").glob("*")
    tensors, _ = read_checkpoint(path) or ({}, {})
    for name, weight in read_trained_heads(spec.heads_path).named_parameters():
        assert torch.equal(tensors[f"modules/heads.{name}"], weight), name


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_resume_before_at_and_after_the_best_state_ends_with_it(
    make_spec, one_in_the_middle_is_best, after
):
    whole, broken = (
        make_spec("whole", epochs=5, patience=100),
        make_spec("broken", epochs=5, patience=100, checkpoint_every=1),
    )
    expected = train(whole)
    with pytest.raises(Stopped):
        train(broken, progress=stop_at(one_in_the_middle_is_best - 1 + after))
    assert train(broken)["best_step"] == expected["best_step"] == one_in_the_middle_is_best
    assert whole.heads_path.read_bytes() == broken.heads_path.read_bytes()


@pytest.mark.parametrize("patience", [1, 2])
def test_training_ends_after_so_many_evaluations_without_a_lower_loss(
    make_spec, one_in_the_middle_is_best, patience
):
    spec = make_spec(epochs=5, patience=patience)
    summary = train(spec)
    later = [step for step in sorted(evaluations(spec)) if step > one_in_the_middle_is_best]
    assert len(later) == patience and summary["steps"] == later[-1]


@pytest.mark.parametrize("loss", [1.0, 1.5, math.nan])
def test_only_a_lower_loss_makes_a_later_state_the_best(loss):
    state = TrainState()
    assert state.record_evaluation({"at": 0}, 1.0)
    state.advance(0.0, 1, 1.0)
    assert not state.record_evaluation({"at": 1}, loss)
    assert (state.best_step, state.best_loss, state.stale, state.evaluation) == (
        0,
        1.0,
        1,
        {"at": 0},
    )


def test_where_nothing_is_held_out_the_last_state_is_kept(make_spec, monkeypatch):
    usual = make_spec("usual")
    train(usual)
    for room in ("heads_only", "evaluation"):
        monkeypatch.setattr(f"pipeline.training.{room}.SPLIT", "nothing")
    spec = make_spec("alone", patience=1)
    summary = train(spec)
    assert "best_step" not in summary and summary["held_out"] == [] and summary["frequency"] == {}
    assert spec.heads_path.read_bytes() == usual.heads_path.read_bytes()
