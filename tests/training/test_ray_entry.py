from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from pipeline.errors import ConfigError, DataError
from pipeline.execution.placement import Placement
from pipeline.execution.progress import Progress, ProgressReporter
from pipeline.training.phases import count_steps, train
from pipeline.training.task import TrainSpec

pytest.importorskip("ray")


def train_through_ray(spec: TrainSpec, workers: int, show):
    """As the train stage does: Ray Train starts the workers from a Ray task, and this process shows their progress."""
    from pipeline.execution.ray_executor import RayExecutor
    from pipeline.training.ray_entry import train_on_ray

    arguments = {"spec": spec, "placement": Placement(workers, 1, 0), "max_failures": 3}
    progress = ProgressReporter(spec.path / "progress.tmp", show)
    return RayExecutor().call(train_on_ray, arguments, Placement(1, 0, 0), progress)


@pytest.mark.slow
def test_two_workers_train_heads_first_and_then_the_backbone_with_them(ray_cluster, make_tuning, monkeypatch):
    """The second stage with the backbone split over them. Of a worker's death: tests/training/test_own_method.py."""
    from pipeline.training import ray_entry

    settings = {"recipe": "two-stage", "epochs": 2, "lora_dropout": 0.3}
    alone, together = make_tuning("one", **settings), make_tuning("two", shard=True, **settings)
    expected = train(alone)
    shown, threads = [], set(threading.enumerate())

    def show(now: Progress) -> None:
        shown.append((now.done, now.total))
        assert set(threading.enumerate()) <= threads  # one that waits in Ray ends the process when Ray is shut down

    found = train_through_ray(together, 2, show)
    assert shown[-1] == (count_steps(together), count_steps(together)) and shown == sorted(shown)
    assert found["final_loss"] == pytest.approx(expected["final_loss"], rel=1e-2)
    assert found["drift"]["kl"] == pytest.approx(expected["drift"]["kl"], rel=0.05)
    adapters = [load_file(spec.adapter_path / "adapter_model.safetensors") for spec in (together, alone)]
    assert all(torch.allclose(adapters[0][name], tensor, atol=0.01) for name, tensor in adapters[1].items())
    monkeypatch.delattr(ray_entry, "TorchTrainer")  # a finished run called again starts nothing
    assert ray_entry.train_on_ray(together, Placement(2, 1, 0), max_failures=3) == found


def test_bad_data_is_refused_before_workers_start(make_spec):
    from pipeline.training.ray_entry import train_on_ray

    spec = TrainSpec(**{**vars(make_spec()), "fingerprint": "e" * 64})
    with pytest.raises(DataError, match="another run"):
        train_on_ray(spec, Placement(1, 1, 0), max_failures=3)


class InThisProcess:
    """In the place of Ray's trainer: its first worker runs here, and what it returns or raises crosses as a pickle."""

    def __init__(self, worker, *, train_loop_config, **_):
        self.worker, self.config = worker, train_loop_config

    def fit(self):
        try:
            return SimpleNamespace(return_value=pickle.loads(pickle.dumps(self.worker(self.config))))
        except DataError as error:
            failed = RuntimeError("training failed")
            failed.worker_failures = {0: pickle.loads(pickle.dumps(error))}
            raise failed from None


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("wrong", [{"vocab_size": 20}, {"fingerprint": "e" * 64}], ids=["everywhere", "in one's data"])
def test_an_error_meant_for_the_user_comes_out_of_a_worker_as_it_is(make_spec, monkeypatch, workers, wrong):
    from pipeline.training import ray_entry

    spec = replace(make_spec(), **wrong)
    with pytest.raises((ConfigError, DataError)) as expected:
        train(spec)
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: workers)
    monkeypatch.setattr(ray_entry, "get_context", lambda: context)
    monkeypatch.setattr(ray_entry, "TorchTrainer", InThisProcess)
    monkeypatch.setattr(ray_entry, "count_steps", lambda spec: 0)  # which would refuse bad data before any worker
    with pytest.raises(type(expected.value)) as found:
        ray_entry.train_on_ray(spec, Placement(workers, 1, 0), max_failures=3)
    assert found.value.args == expected.value.args
