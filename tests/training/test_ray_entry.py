"""Start of a training's workers, and their errors; tests/test_flow_ray.py trains."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest

from pipeline.errors import ConfigError, DataError
from pipeline.execution.placement import Placement
from pipeline.training.heads_only import HeadsLearner

ray_entry = pytest.importorskip("pipeline.training.ray_entry", exc_type=ImportError)


class InThisProcess:
    """Stands for Ray's trainer: its first worker runs here, and what it returns or raises crosses
    as a pickle.
    """

    def __init__(self, worker, *, train_loop_config, **_):
        self.worker, self.config = worker, train_loop_config

    def fit(self):
        try:
            result = self.worker(self.config)
        except DataError as error:
            failed = RuntimeError("training failed")
            failed.worker_failures = {0: pickle.loads(pickle.dumps(error))}
            raise failed from None
        return SimpleNamespace(return_value=pickle.loads(pickle.dumps(result)))


class Refusing(HeadsLearner):
    """Fails as on every worker."""

    def __init__(self, *_):
        raise ConfigError("It cannot be trained.", "train.heads", "Choose another.")


class Damaged(HeadsLearner):
    """Fails as on one worker alone."""

    def __init__(self, *_):
        raise DataError("A shard is damaged.", "00000.parquet", "Make it again.")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("learner", "error"), [(Refusing, ConfigError), (Damaged, DataError)])
def test_a_workers_error_reaches_the_user_unchanged(
    make_spec, monkeypatch, workers, learner, error
):
    spec = replace(make_spec(), phases=(("", learner),))
    with pytest.raises(error) as expected:
        learner()
    context = SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: workers)
    monkeypatch.setattr(ray_entry, "get_context", lambda: context)
    monkeypatch.setattr(ray_entry, "TorchTrainer", InThisProcess)
    with pytest.raises(error) as found:
        ray_entry.train_on_ray(spec, Placement(workers, 1, 0), 3, print)
    assert found.value.args == expected.value.args
