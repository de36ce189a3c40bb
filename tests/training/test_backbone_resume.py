"""A training of heads and backbone, interrupted, on two workers, and in micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeline.training.metrics import read_metrics
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import train
from tests.training.trainings import (
    Stopped,
    same_curve,
    same_weights,
    stop_at,
    trainer_of,
    weights,
)
from tests.training.two_workers import train_as_two


@pytest.mark.parametrize(
    ("stop", "optimizer"),
    [(3, "adamw"), pytest.param(5, "adamw-8bit", marks=pytest.mark.slow)],
)
def test_an_interrupted_run_ends_as_an_uninterrupted_one(make_tuning, stop, optimizer):
    """Mid-epoch and with dropout, which has to be drawn equally; checkpoints are at 3 and 6."""
    settings = {"lora_dropout": 0.3, "gradient_checkpointing": True, "epochs": 3}
    whole, broken = (
        make_tuning(name, optimizer=optimizer, **settings) for name in ("whole", "broken")
    )
    expected = train(whole)
    with pytest.raises(Stopped):
        train(broken, progress=stop_at(stop))
    assert not broken.heads_path.exists() and not broken.adapter_path.exists()
    found = train(broken)
    assert same_weights(whole, broken) and same_curve(whole.path, broken.path)
    assert found.drift == expected.drift and found.steps == expected.steps


@pytest.mark.slow
@pytest.mark.parametrize("late", [(2, "heads-first"), (3, "")])
def test_a_run_of_two_stages_resumes_in_either(make_tuning, late):
    settings = {"recipe": "two-stage", "epochs": 2, "batch_tokens": 150}
    whole, broken = (make_tuning(name, **settings) for name in ("whole", "broken"))
    train(whole)
    with pytest.raises(Stopped):
        train(broken, progress=stop_at(*late))
    assert (broken.path / "heads-first" / "heads.safetensors").exists() is (late[1] == "")
    train(broken)
    assert same_weights(whole, broken)


def seeds_of(spec: TrainSpec, workers: Workers, step: int) -> list[int]:
    """The seeds of one worker's forwards in a step, without that of an empty one."""
    batches = trainer_of(spec, workers).learner.batches(step)
    return [batch.seed for batch in batches if len(batch.texts.next_N)]


def test_every_forward_draws_its_own_dropout_on_any_worker(make_tuning):
    spec = make_tuning(micro_batch=1, batch_sequences=3)
    alone = seeds_of(spec, Workers(), 0)
    assert len(set(alone)) == len(alone) > 1
    assert seeds_of(spec, Workers(0, 2), 0) + seeds_of(spec, Workers(1, 2), 0) == alone
    assert set(alone).isdisjoint(seeds_of(spec, Workers(), 1))
    assert set(alone).isdisjoint(seeds_of(replace(spec, seed=2), Workers(), 0))


@pytest.mark.slow
def test_two_workers_follow_the_curve_of_one_through_both_stages(make_tuning, tmp_path):
    """The second worker has one sequence more in most steps."""
    settings = {"recipe": "two-stage", "lora_dropout": 0.3, "epochs": 2, "batch_sequences": 3}
    settings.update(soft_labels=0.5, lm_head="shared", noise=0.2)
    alone, together = make_tuning("alone", **settings), make_tuning("together", **settings)
    train(alone)
    train_as_two(train, together, tmp_path)
    for phase in ("heads-first", "."):
        ours, theirs = read_metrics(together.path / phase), read_metrics(alone.path / phase)
        for two, one in zip(ours, theirs, strict=True):
            assert one["step"] == two["step"] and one.get("tokens") == two.get("tokens")
            assert two.get("loss", 0) == pytest.approx(one.get("loss", 0), rel=1e-3)
            for head, other in zip(two.get("held_out", ()), one.get("held_out", ()), strict=True):
                assert head["loss"] == pytest.approx(other["loss"], rel=1e-3)
            if "drift" in one:
                assert two["drift"]["kl"] == pytest.approx(one["drift"]["kl"], rel=1e-2, abs=1e-7)
                assert two["drift"]["positions"] == one["drift"]["positions"]
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(together)[name], tensor, rtol=1e-2, atol=1e-3)
