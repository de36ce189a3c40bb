"""The driver is killed while it merges the tuned backbone: nothing is trained again, the same
backbone comes out.
"""

from __future__ import annotations

import signal

import pytest

from tests.faults.processes import run_until_killed
from tests.faults.unfinished import write_config
from tests.flows.tiny import latest, run_again

pytestmark = pytest.mark.fault

JOINT = {
    "train__method": "medusa-2",
    "train__backbone__sequence_length": 96,
    "train__backbone__batch_sequences": 4,
    "train__backbone__lora_rank": 4,
}
DEATHS = [
    ("renamed", "heads.safetensors", False),
    ("rename", "backbone", False),
    ("renamed", "backbone", True),
]


@pytest.mark.slow
def test_a_merge_that_is_killed_is_whole_or_absent_and_done_again_from_the_same_adapter(
    make_settings, make_config, tmp_path
):
    config = write_config(tmp_path / "run.yaml", make_settings(tmp_path, **JOINT))
    reference = run_again(make_config(tmp_path, run__name="reference", **JOINT), until="train")
    run = run_again(make_config(tmp_path, **JOINT), until="generate")
    for moment, file, whole in DEATHS:
        assert run_until_killed(config, moment, file) == -signal.SIGKILL
        stage = latest(run, "train")
        assert stage.done is None and (stage.path / "backbone").is_dir() == whole
    trained = (stage.path / "heads.safetensors").stat().st_mtime_ns
    run = run_again(make_config(tmp_path, **JOINT), until="train")
    ours, theirs = (latest(of, "train").path for of in (run, reference))
    assert (ours / "heads.safetensors").stat().st_mtime_ns == trained
    assert sorted(path.name for path in ours.iterdir()) == sorted(
        path.name for path in theirs.iterdir()
    )
    for path in (theirs / "backbone").iterdir():
        assert (ours / "backbone" / path.name).read_bytes() == path.read_bytes()
    assert latest(run, "train").verify() == []
