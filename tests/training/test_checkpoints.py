from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from pipeline.config import TrainConfig
from pipeline.errors import EnvironmentFault
from pipeline.training import checkpoints as room
from pipeline.training.checkpoints import Checkpoint, Checkpoints
from pipeline.training.task import Workers

CPU = torch.device("cpu")


def checkpoint(value: int) -> Checkpoint:
    tensors = {
        "a": torch.full((3, 4), float(value)),
        "b": torch.tensor(value),
        "c": torch.arange(5, dtype=torch.uint8),
    }
    return Checkpoint(tensors, {"step": value})


def save(directory: Path, *steps: int) -> Checkpoints:
    with Checkpoints(directory, TrainConfig()) as checkpoints:
        for step in steps:
            checkpoints.save(step, checkpoint(step))
    return checkpoints


def newest(checkpoints: Checkpoints) -> int | None:
    """The step of the newest checkpoint, which has to be as it was saved."""
    found = checkpoints.read_newest(Workers(), CPU)
    if found is None:
        return None
    step = found.state["step"]
    for name, tensor in checkpoint(step).tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor)
    return step


def test_later_steps_do_not_touch_a_saved_checkpoint(tmp_path):
    live = checkpoint(1)
    with Checkpoints(tmp_path, TrainConfig()) as checkpoints:
        checkpoints.save(1, live)
        live.tensors["a"].zero_()
    assert newest(checkpoints) == 1


def test_a_checkpoint_is_due_by_minutes_or_by_steps(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    with Checkpoints(tmp_path, TrainConfig(checkpoint_minutes=2)) as checkpoints:
        now[0] = 60
        checkpoints.save(1, checkpoint(1))
        for seconds, due in ((179, False), (180, True)):
            now[0] = seconds
            assert checkpoints.is_due(2) == due
    by_steps = Checkpoints(tmp_path, TrainConfig(checkpoint_every=3))
    assert [step for step in range(1, 10) if by_steps.is_due(step)] == [3, 6, 9]


def test_a_flipped_bit_anywhere_falls_back_to_the_one_before(tmp_path):
    checkpoints = save(tmp_path, 1, 2)
    path = checkpoints.path(2)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        # A flip in the header's padding changes nothing that is read.
        assert newest(checkpoints) in (1, 2)
    for damaged in (whole[:-1], b""):
        path.write_bytes(damaged)
        assert newest(checkpoints) == 1
    checkpoints.path(1).write_bytes(b"")
    assert newest(checkpoints) is None


def test_the_newest_are_kept_and_damaged_ones_displace_none(tmp_path):
    assert save(tmp_path / "whole", 10, 20, 30, 40).saved_steps() == [40, 30]
    save(tmp_path, 10, 20).path(20).write_bytes(b"damaged")
    assert save(tmp_path, 15).saved_steps() == [15, 10]


def test_a_full_disk_is_reported_and_keeps_the_checkpoint_before(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(room, "save_file", full)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.safetensors"]
