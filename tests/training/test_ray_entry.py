"""What happens before the workers of a training start, and how their errors come out;
tests/test_flow_ray.py trains.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.execution.placement import Placement
from pipeline.training.phases import train
from pipeline.training.task import TrainSpec

pytest.importorskip("ray")


def test_bad_data_is_refused_before_workers_start(make_spec):
    from pipeline.training.ray_entry import train_on_ray

    spec = TrainSpec(**{**vars(make_spec()), "fingerprint": "e" * 64})
    with pytest.raises(DataError, match="another run"):
        train_on_ray(spec, Placement(1, 1, 0), max_failures=3)


class InThisProcess:
    """In the place of Ray's trainer: its first worker runs here, and what it returns or raises
    crosses as a pickle.
    """

    def __init__(self, worker, *, train_loop_config, **_):
        self.worker, self.config = worker, train_loop_config

    def fit(self):
        try:
            return SimpleNamespace(
                return_value=pickle.loads(pickle.dumps(self.worker(self.config)))
            )
        except DataError as error:
            failed = RuntimeError("training failed")
            failed.worker_failures = {0: pickle.loads(pickle.dumps(error))}
            raise failed from None


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    "wrong", [{"vocab_size": 20}, {"fingerprint": "e" * 64}], ids=["everywhere", "in one's data"]
)
def test_an_error_meant_for_the_user_comes_out_of_a_worker_as_it_is(
    make_spec, monkeypatch, workers, wrong
):
    from pipeline.training import ray_entry

    spec = replace(make_spec(), **wrong)
    with pytest.raises((ConfigError, DataError)) as expected:
        train(spec)
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: workers)
    monkeypatch.setattr(ray_entry, "get_context", lambda: context)
    monkeypatch.setattr(ray_entry, "TorchTrainer", InThisProcess)
    monkeypatch.setattr(
        ray_entry, "count_steps", lambda spec: 0
    )  # which would refuse bad data before any worker
    with pytest.raises(type(expected.value)) as found:
        ray_entry.train_on_ray(spec, Placement(workers, 1, 0), max_failures=3)
    assert found.value.args == expected.value.args
