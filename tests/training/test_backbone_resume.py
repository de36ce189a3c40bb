"""How a training of heads and backbone ends: interrupted, on two workers, in other portions; and
what it leaves.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import DataError
from pipeline.training.metrics import read_metrics
from pipeline.training.phases import train
from pipeline.training.task import TrainSpec, Workers
from tests.training.trainings import Stopped, stop_at, trainer_of
from tests.training.two_workers import train_as_two


def weights(spec: TrainSpec) -> dict[str, torch.Tensor]:
    """Heads and adapter."""
    return load_file(spec.heads_path) | load_file(spec.adapter_path / "adapter_model.safetensors")


def same(one: TrainSpec, other: TrainSpec) -> bool:
    ours, theirs = weights(one), weights(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


@pytest.mark.parametrize(
    ("stop", "optimizer"),
    [
        pytest.param(1, "adamw", marks=pytest.mark.slow),
        (3, "adamw"),
        pytest.param(5, "adamw", marks=pytest.mark.slow),
        pytest.param(5, "adamw-8bit", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(
    make_tuning, stop, optimizer
):
    """Mid-epoch and with dropout, which must come out the same again; checkpoints are at 3 and
    6.
    """
    settings = {
        "optimizer": optimizer,
        "lora_dropout": 0.3,
        "gradient_checkpointing": True,
        "epochs": 3,
    }
    whole, broken = (make_tuning(name, **settings) for name in ("whole", "broken"))
    expected = train(whole)
    with pytest.raises(Stopped):
        train(broken, progress=stop_at(stop))
    assert not broken.heads_path.exists() and not broken.adapter_path.exists()
    found = train(broken)
    assert same(whole, broken)
    timeless = {"seconds": 0, "tokens_per_second": 0}
    assert found | timeless == expected | timeless and found["steps"] % 3 == 0
    for line, other in zip(read_metrics(broken.path), read_metrics(whole.path), strict=True):
        assert line | {"tokens_per_second": 0} == other | {"tokens_per_second": 0}


@pytest.mark.slow
@pytest.mark.parametrize("late", [-1, 3])
def test_a_run_of_two_stages_resumes_in_either(make_tuning, late):
    whole, broken = (
        make_tuning(name, recipe="two-stage", epochs=2, batch_tokens=150)
        for name in ("whole", "broken")
    )
    first = train(whole)["heads_first"]["steps"]
    with pytest.raises(Stopped):
        train(broken, progress=stop_at(first + late))
    assert (broken.path / "heads-first" / "heads.safetensors").exists() is (late > 0)
    train(broken)
    assert same(whole, broken)


def test_dropout_differs_from_step_to_step_and_with_the_seed(make_tuning):
    specs = [make_tuning(str(seed), lora_dropout=0.5, epochs=1) for seed in range(2)]
    specs[1] = replace(specs[1], seed=2)
    for spec in specs:
        train(spec)
    assert not same(*specs)


def seeds_of(spec: TrainSpec, workers: Workers, step: int) -> list[int]:
    """The seeds of one worker's forwards in a step, without that of a forward of nothing."""
    batches = trainer_of(spec, workers).learner.batches(step)
    return [batch.seed for batch in batches if len(batch.texts.next_N)]


def test_every_forward_draws_its_own_dropout_on_any_worker(make_tuning):
    spec = make_tuning(micro_batch=1, batch_sequences=3)
    alone = seeds_of(spec, Workers(), 0)
    assert len(set(alone)) == len(alone) > 1
    assert seeds_of(spec, Workers(0, 2), 0) + seeds_of(spec, Workers(1, 2), 0) == alone
    assert set(alone).isdisjoint(seeds_of(spec, Workers(), 1))


def test_the_size_of_a_forward_changes_the_curve_by_rounding_alone(make_tuning):
    one, many = (make_tuning(str(size), micro_batch=size, lora_dropout=0.0) for size in (1, 4))
    train(one)
    train(many)
    for line, other in zip(read_metrics(one.path), read_metrics(many.path), strict=True):
        assert other.get("loss", 0) == pytest.approx(line.get("loss", 0), rel=1e-3)
    for name, weight in weights(one).items():
        torch.testing.assert_close(weights(many)[name], weight, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_two_workers_follow_the_curve_of_one_through_both_stages(make_tuning, tmp_path):
    """The second worker is another process; they meet over gloo. In most steps it has one sequence
    more.
    """
    settings = {"recipe": "two-stage", "lora_dropout": 0.3, "epochs": 2, "batch_sequences": 3}
    alone, together = make_tuning("alone", **settings), make_tuning("together", **settings)
    train(alone)
    train_as_two(train, together, tmp_path)
    phases = (
        zip(*map(read_metrics, (alone.path / name, together.path / name)), strict=True)
        for name in ("heads-first", ".")
    )
    for one, two in (pair for lines in phases for pair in lines):
        assert one["step"] == two["step"] and one.get("tokens") == two.get("tokens")
        assert two.get("loss", 0) == pytest.approx(one.get("loss", 0), rel=1e-3)
        if "drift" in one:
            assert two["drift"]["kl"] == pytest.approx(one["drift"]["kl"], rel=1e-2, abs=1e-7)
            assert two["drift"]["positions"] == one["drift"]["positions"]
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(together)[name], tensor, rtol=1e-2, atol=1e-3)


def test_a_finished_run_called_again_does_nothing(make_tuning):
    spec = make_tuning(epochs=1)
    summary = train(spec)
    assert json.loads(json.dumps(summary)) == summary
    before = {path: path.stat().st_mtime_ns for path in spec.path.rglob("*")}
    assert train(spec, progress=stop_at(1)) == summary
    assert {path: path.stat().st_mtime_ns for path in spec.path.rglob("*")} == before


def test_without_held_out_text_to_measure_the_drift_on_nothing_is_trained(make_tuning, monkeypatch):
    monkeypatch.setattr("pipeline.training.heads_and_backbone.SPLIT", "nothing")
    spec = make_tuning(epochs=1)
    with pytest.raises(DataError, match="No held-out row"):
        train(spec)
    assert not spec.heads_path.exists()
