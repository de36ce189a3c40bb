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
from pipeline.flow import STAGES
from pipeline.stages import features, generate
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import TargetSpec
from tests.flows.tiny import latest, run_again, stored

GOLDEN = {
    "seeds": (8, "eaf61e0771c4b5ca"),
    "generate": (7, "fb9877c8f5dffdd6"),
    "features": (4, "63756a3119aa5866"),
    "row-features": (1, "960115ad1f7e6800"),
}


class Echo:
    """States that say which token and which position they are of."""

    dtype, hidden_size = torch.float32, 2

    def __init__(self, layers):
        self.copies = max(1, len(layers))

    def stream(self, rows):
        for index, ids in enumerate(rows):
            states_TD = torch.stack([torch.tensor(ids), torch.arange(len(ids))], 1).float()
            yield index, states_TD.repeat(1, self.copies)


@pytest.fixture(scope="module")
def made(tmp_path_factory, make_config, tiny_target) -> dict[str, StageDirectory]:
    """The stages that write shards, without a model: the seeds' own answers, and states that
    are made up.
    """
    root, spec = tmp_path_factory.mktemp("golden"), TargetSpec(str(tiny_target))
    found = {"seeds": latest(run_again(make_config(root), until="seeds"), "seeds")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "make_feature_engine", lambda *arguments: Echo(arguments[-1]))
        workers = {
            "generate": generate.Worker(spec, GenerateConfig(mode="passthrough"), seed=0, gpus=0),
            "features": features.Worker(spec, FeaturesConfig(), gpus=0),
            "row-features": features.Worker(spec, FeaturesConfig(), gpus=0, layers=(1, 3)),
        }
    for name, worker in workers.items():
        upstream = "seeds" if name == "generate" else "generate"
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


@pytest.mark.parametrize("name", GOLDEN)
def test_a_stage_s_output_changes_only_with_its_version(made, name):
    assert (STAGES[name].version, digest(made[name])) == GOLDEN[name]
