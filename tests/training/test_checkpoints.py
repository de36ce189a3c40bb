from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from pipeline.config import TrainConfig
from pipeline.errors import EnvironmentFault
from pipeline.training import checkpoints as room
from pipeline.training.checkpoints import Checkpoints, read_checkpoint
from pipeline.training.task import Workers


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "a": torch.full((3, 4), value),
        "b": torch.tensor(value),
        "c": torch.arange(5, dtype=torch.uint8),
    }


CPU = torch.device("cpu")


def newest(checkpoints: Checkpoints) -> int | None:
    return checkpoints.newest(Workers(), CPU)


def saved(directory: Path, *steps: int, keep: int = 2) -> Checkpoints:
    with Checkpoints(directory, TrainConfig(keep_checkpoints=keep)) as checkpoints:
        for step in steps:
            checkpoints.save(step, tensors(step), {"step": step})
    return checkpoints


def test_tensors_and_state_come_back_as_they_were(tmp_path):
    checkpoints = saved(tmp_path, 5)
    assert newest(checkpoints) == 5
    found, state = checkpoints.load(5)
    assert state == {"step": 5}
    for name, tensor in tensors(5).items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_checkpoint_is_a_copy_that_later_steps_do_not_touch(tmp_path):
    live = tensors(1)
    with Checkpoints(tmp_path, TrainConfig()) as checkpoints:
        checkpoints.save(1, live, {})
        live["a"].zero_()
    assert torch.equal(checkpoints.load(1)[0]["a"], tensors(1)["a"])


def test_checkpoints_that_follow_at_once_are_each_as_they_were(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, keep=3)
    for step in (1, 2, 3):
        assert torch.equal(checkpoints.load(step)[0]["a"], tensors(step)["a"])


def test_one_is_due_after_so_many_minutes_or_so_many_steps(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(room.time, "monotonic", lambda: now[0])
    with Checkpoints(tmp_path, TrainConfig(checkpoint_minutes=2)) as checkpoints:
        for seconds, due in ((119, False), (120, True), (239, False), (240, True)):
            now[0] = seconds
            assert checkpoints.due(seconds) == due
            if due:
                checkpoints.save(seconds, tensors(1), {})
        now[0] = 1e9
        by_steps = Checkpoints(tmp_path, TrainConfig(checkpoint_every=3))
        assert [step for step in range(1, 10) if by_steps.due(step)] == [3, 6, 9]


def test_a_resume_verifies_a_checkpoint_once(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    digests = []
    monkeypatch.setattr(
        room, "digest", lambda *of, digest=room.digest: digests.append(of) or digest(*of)
    )
    first, other = (Checkpoints(tmp_path, TrainConfig()) for _ in range(2))
    loaded = [worker.load(1) for worker in (first, other) if worker is other or newest(first)]
    assert len(digests) == 1 and torch.equal(loaded[0][0]["a"], loaded[1][0]["a"])


def test_only_the_newest_are_kept(tmp_path):
    assert saved(tmp_path, 10, 20, 30, 40, keep=2).saved() == [40, 30]


def test_a_flipped_bit_anywhere_falls_back_to_the_checkpoint_before(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    path = Checkpoints(tmp_path, TrainConfig()).path(2)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        # A flip in the header's padding changes nothing that is read.
        assert newest(checkpoints) == 1 or torch.equal(checkpoints.load(2)[0]["a"], tensors(2)["a"])
    path.write_bytes(whole[:-1])
    assert newest(checkpoints) == 1


def test_without_a_whole_checkpoint_training_starts_over(tmp_path):
    checkpoints = saved(tmp_path, 1)
    path = Checkpoints(tmp_path, TrainConfig()).path(1)
    path.write_bytes(b"")
    assert newest(checkpoints) is None and read_checkpoint(path) is None


def test_a_damaged_newest_never_crowds_out_what_training_saves_next(tmp_path):
    checkpoints = saved(tmp_path, 10, 20, keep=1)
    Checkpoints(checkpoints.directory, TrainConfig()).path(20).write_bytes(b"damaged")
    assert saved(tmp_path, 15, keep=1).saved() == [15]


def test_a_write_that_fails_leaves_the_checkpoint_before_and_says_why(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(room, "save_file", full)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        saved(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.safetensors"]
