"""A stage's code version is part of its fingerprint: whoever changes what it makes of the same
input raises it.

When one of these fails and the new result is meant: raise the stage's VERSION, and write version
and hash down here.
"""

from __future__ import annotations

import hashlib
import json

import pytest
import torch

from pipeline.config import FeaturesConfig, GenerateConfig
from pipeline.stages import features, generate, seeds
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import TargetSpec
from tests.flows.tiny import latest, run_again, stored

GOLDEN = {
    "seeds": (8, "eaf61e0771c4b5ca"),
    "generate": (7, "fb9877c8f5dffdd6"),
    "features": (3, "63756a3119aa5866"),
}


class Echo:
    """States that say which token and which position they are of."""

    dtype, hidden_size = torch.float32, 2

    def stream(self, rows):
        for index, ids in enumerate(rows):
            yield index, torch.stack([torch.tensor(ids), torch.arange(len(ids))], 1).float()


@pytest.fixture(scope="module")
def made(tmp_path_factory, make_config, tiny_target) -> dict[str, StageDirectory]:
    """The three stages that write shards, without a model: the seeds' own answers, and states that
    are made up.
    """
    root, spec = tmp_path_factory.mktemp("golden"), TargetSpec(str(tiny_target))
    found = {"seeds": latest(run_again(make_config(root), until="seeds"), "seeds")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "make_feature_engine", lambda *arguments: Echo())
        workers = {
            "generate": generate.Worker(spec, GenerateConfig(mode="passthrough"), seed=0, gpus=0),
            "features": features.Worker(spec, FeaturesConfig(), gpus=0),
        }
    for (name, worker), upstream in zip(workers.items(), ("seeds", "generate"), strict=True):
        found[name] = StageDirectory(root, name, "0" * 64)
        for task in found[name].tasks(found[upstream], found[upstream].receipts()):
            worker(task)
    return found


def digest(stage: StageDirectory) -> str:
    rows = stored(stage)
    assert len(rows) == 40
    return hashlib.sha256(json.dumps(rows, sort_keys=True, default=bytes.hex).encode()).hexdigest()[
        :16
    ]


@pytest.mark.parametrize("stage", [seeds, generate, features], ids=lambda stage: stage.NAME)
def test_a_stage_s_output_changes_only_with_its_version(made, stage):
    assert (stage.VERSION, digest(made[stage.NAME])) == GOLDEN[stage.NAME]
