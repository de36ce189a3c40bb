from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from pipeline.config import TrainConfig
from pipeline.errors import EnvironmentFault
from pipeline.training import checkpoints as room
from pipeline.training.checkpoints import Checkpoints, Saved, read_checkpoint
from pipeline.training.sharded_heads import RowsOverWorkers
from pipeline.training.task import Workers


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 4), value), "b": torch.tensor(value), "c": torch.arange(5, dtype=torch.uint8)}


def saved(directory: Path, *steps: int, keep: int = 2) -> Checkpoints:
    with Checkpoints(directory, TrainConfig(keep_checkpoints=keep)) as checkpoints:
        for step in steps:
            checkpoints.save(step, tensors(step), {"step": step})
    return checkpoints


def test_tensors_and_state_come_back_as_they_were(tmp_path):
    checkpoints = saved(tmp_path, 5)
    newest = checkpoints.newest()
    assert newest == Saved(5)
    found, state = checkpoints.load(newest)
    assert state == {"step": 5}
    for name, tensor in tensors(5).items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_a_checkpoint_is_a_copy_that_later_steps_do_not_touch(tmp_path):
    live = tensors(1)
    with Checkpoints(tmp_path, TrainConfig()) as checkpoints:
        checkpoints.save(1, live, {})
        live["a"].zero_()
    assert torch.equal(checkpoints.load(Saved(1))[0]["a"], tensors(1)["a"])


def test_checkpoints_that_follow_at_once_are_each_as_they_were(tmp_path):
    checkpoints = saved(tmp_path, 1, 2, 3, keep=3)
    for step in (1, 2, 3):
        assert torch.equal(checkpoints.load(Saved(step))[0]["a"], tensors(step)["a"])


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
    monkeypatch.setattr(room, "digest", lambda *of, digest=room.digest: digests.append(of) or digest(*of))
    first, other = (Checkpoints(tmp_path, TrainConfig()) for _ in range(2))
    loaded = [worker.load(Saved(1)) for worker in (first, other) if worker is other or first.newest()]
    assert len(digests) == 1 and torch.equal(loaded[0][0]["a"], loaded[1][0]["a"])


def test_only_the_newest_are_kept(tmp_path):
    assert saved(tmp_path, 10, 20, 30, 40, keep=2).saved() == [Saved(40), Saved(30)]


def test_a_flipped_bit_anywhere_falls_back_to_the_checkpoint_before(tmp_path):
    checkpoints = saved(tmp_path, 1, 2)
    path = Saved(2).path(tmp_path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        newest = checkpoints.newest()
        # A flip in the header's padding changes nothing that is read.
        assert newest == Saved(1) or torch.equal(checkpoints.load(Saved(2))[0]["a"], tensors(2)["a"])
    path.write_bytes(whole[:-1])
    assert checkpoints.newest() == Saved(1)


def test_without_a_whole_checkpoint_training_starts_over(tmp_path):
    checkpoints = saved(tmp_path, 1)
    path = Saved(1).path(tmp_path)
    path.write_bytes(b"")
    assert checkpoints.newest() is None and read_checkpoint(path) is None


def test_a_damaged_newest_never_crowds_out_what_training_saves_next(tmp_path):
    checkpoints = saved(tmp_path, 10, 20, keep=1)
    Saved(20).path(checkpoints.directory).write_bytes(b"damaged")
    assert saved(tmp_path, 15, keep=1).saved() == [Saved(15)]


def test_a_write_that_fails_leaves_the_checkpoint_before_and_says_why(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(room, "save_file", full)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        saved(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001.safetensors"]


class Part(Workers):
    """One of several workers of which nobody waits for another."""

    def wait(self) -> None:
        pass


def rows_of(workers: Workers, num_rows: int):
    return lambda name, tensor: RowsOverWorkers(num_rows, workers) if name != "same" else None


def saved_in_parts(
    directory: Path, step: int, whole: dict[str, torch.Tensor], num_workers: int, num_rows: int, *, keep: int = 1
) -> None:
    """As so many workers save it; `same` is the same on all, of the others each has some rows."""
    for rank in range(num_workers):
        workers = Part(rank, num_workers)
        rows = RowsOverWorkers(num_rows, workers)
        parts = {"same": whole["same"], "matrix": rows.part(whole["matrix"])}
        parts["absmax"] = rows.part(whole["absmax"].unflatten(0, (num_rows, -1))).flatten()
        with Checkpoints(directory, TrainConfig(keep_checkpoints=keep), workers) as checkpoints:
            state = {"step": step, "rows": {"matrix": num_rows, "absmax": num_rows} if num_workers > 1 else {}}
            checkpoints.save(step, parts, state)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1), (4, 4)])
def test_parts_of_any_number_of_workers_come_back_as_those_of_another(tmp_path, before, after):
    num_rows = 7
    whole = {"same": torch.arange(3), "matrix": torch.randn(2, num_rows, 4), "absmax": torch.randn(2 * num_rows)}
    saved_in_parts(tmp_path, 5, whole, before, num_rows)
    for rank in range(after):
        workers = Part(rank, after)
        found, state = Checkpoints(tmp_path, TrainConfig(), workers).load(Saved(5, before), rows_of(workers, num_rows))
        rows = RowsOverWorkers(num_rows, workers)
        assert state["step"] == 5 and torch.equal(found["same"], whole["same"])
        assert torch.equal(found["matrix"], rows.part(whole["matrix"]))
        assert torch.equal(found["absmax"], rows.part(whole["absmax"].view(num_rows, 2)).flatten())


def test_scales_that_rows_share_are_not_split_anew(tmp_path):
    whole = {"same": torch.arange(3), "matrix": torch.randn(8, 4), "absmax": torch.randn(8)}
    saved_in_parts(tmp_path, 5, whole, 2, 8)
    with pytest.raises(EnvironmentFault, match="8-bit moments cannot be continued"):
        Checkpoints(tmp_path, TrainConfig()).load(Saved(5, 2), rows_of(Part(0, 3), 3))


@pytest.mark.parametrize("harm", ["one part is missing", "one part is damaged"])
def test_a_checkpoint_of_parts_is_whole_or_passed_over_and_its_rest_removed(tmp_path, harm):
    whole = {"same": torch.arange(3), "matrix": torch.randn(4, 2), "absmax": torch.randn(4)}
    for step in (5, 6):
        saved_in_parts(tmp_path, step, whole, 2, 4)
    path = Saved(6, 2).path(tmp_path, 1)
    path.unlink() if harm == "one part is missing" else path.write_bytes(b"damaged")
    assert Checkpoints(tmp_path, TrainConfig()).newest() == Saved(5, 2)
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"step-00000005.{n}-of-2.safetensors" for n in (1, 2)]
