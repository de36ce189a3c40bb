"""Stage workers that end their own process; Ray workers import this file.

Nothing heavy is loaded before a death, so that the many deaths of a bisection are cheap.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

from pipeline.artifacts.generated_rows import GENERATED
from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.storage.receipts import read_receipt
from pipeline.storage.shards import ShardWriter, read_rows, task_rows
from tests.faults.processes import at, die, lose_node
from tests.forks import PATIENCE

WORKERS = 2  # that share a stage's work
MIDDLE = 1  # the shard in which a worker is killed once
STEPS_BEFORE_DEATH = 2


class Stand:
    """A worker that calls `before` on each task and then the stage's own worker.

    Args:
        stage: The stage's name.
    """

    def __init__(self, stage, **arguments):
        self.stage, self._arguments = stage, arguments
        self._real: Any = None

    def __call__(self, task, upcoming=None):
        self.before(task)
        if self._real is None:
            self._real = importlib.import_module(f"pipeline.stages.{self.stage}").Worker(
                **self._arguments
            )
        return self._real(task)

    def before(self, task): ...

    def close(self):
        if self._real is not None:
            self._real.close()


class Together(Stand):
    """A worker that begins once `WORKERS` processes have arrived."""

    def before(self, task):
        come = events_of(task).with_name("come")
        come.mkdir(exist_ok=True)
        (come / str(os.getpid())).touch()
        patience = time.monotonic() + PATIENCE
        while len(list(come.iterdir())) < WORKERS:
            assert time.monotonic() < patience, "some workers never came"
            time.sleep(0.02)


class Copying(Stand):
    """A worker of `generate` that copies the rows of a finished stage, without torch.

    The stage's path is in `finished.txt` beside the run.
    """

    def __init__(self, **arguments):
        super().__init__("generate", **arguments)

    def __call__(self, task, upcoming=None):
        self.before(task)
        finished = Path(diary_of(task, "finished").read_text())
        rows = [row for shard in sorted(finished.glob("shards/*")) for row in read_rows(shard)]
        rejected = {}
        for file in finished.glob("quarantine/*"):
            for line in map(json.loads, file.read_text().splitlines()):
                rejected[line["id"]] = line
        seeds = task_rows(task, ["id"])
        with ShardWriter(task, GENERATED) as writer:
            for seed in seeds:
                if line := rejected.get(seed["id"]):
                    writer.reject(
                        RejectedRow(line["id"], Reason(line["reason"]), line["detail"], line["row"])
                    )
            ids = {seed["id"] for seed in seeds}
            writer.write([row for row in rows if row["parent_id"] in ids])
            made = read_receipt(finished / "shards" / f"{task.index:05d}.parquet")
            assert made is not None
            return writer.commit("generate", ids, made.stats, 0.1)


class KilledOnce(Stand):
    """A worker that is killed once, after it has written a row group of shard `MIDDLE`."""

    def before(self, task):
        if task.index == MIDDLE and first_time(diary_of(task, self.stage), "killed"):
            at("write", f"{self.stage}-*/shards/{task.index:05d}.parquet", die)


class CopyingAndKilledOnce(KilledOnce, Copying):
    """A copying worker that is killed once."""


class HangsAfterOne(Copying):
    """A copying worker that hangs once its first shard is written."""

    def before(self, task):
        if task.index > 0:
            time.sleep(3600)


class LosesItsNode(Copying):
    """A copying worker whose raylet is killed once, while shard `MIDDLE` is written.

    Workers of later shards wait until the driver has logged the death.
    """

    def __init__(self, stage, **arguments):
        super().__init__(**arguments)

    def before(self, task):
        if task.index == MIDDLE and first_time(diary_of(task, self.stage), "lost"):
            at("write", f"{self.stage}-*/shards/{task.index:05d}.parquet", lose_node)
        patience = time.monotonic() + PATIENCE
        while task.index > MIDDLE and "worker-died" not in events_of(task).read_text():
            assert time.monotonic() < patience
            time.sleep(0.2)


class Poisoned(Copying):
    """A copying worker that dies of the row whose id is in `crashing.txt`."""

    def before(self, task):
        if diary_of(task, "crashing").read_text() in {row["id"] for row in task_rows(task, ["id"])}:
            die()


def killed_trainer(config):
    """Run a training worker; kill the last rank once, in its third step."""
    from ray.train import get_context

    from pipeline.training.ray_entry import run_worker
    from pipeline.training.trainer import Trainer

    diary = Path(config["spec"].directory).parents[1] / "trainer.txt"
    step = Trainer.step

    def watched(*arguments):
        with diary.open("a") as file:
            file.write(f"{os.getpid()}\n")
        if diary.read_text().split() == [str(os.getpid())] * (STEPS_BEFORE_DEATH + 1):
            die()
        return step(*arguments)

    if get_context().get_world_rank() == get_context().get_world_size() - 1:
        Trainer.step = watched
    return run_worker(config)


def train_and_be_killed(**arguments):
    """Run `train_on_ray` with one worker that is killed."""
    from pipeline.training import ray_entry

    ray_entry.run_worker = killed_trainer  # in a Ray task's own process
    return ray_entry.train_on_ray(**arguments)


def diary_of(task, name):
    """Return the path of a text file beside the run of a task."""
    return events_of(task).parent.with_name(f"{name}.txt")


def events_of(task):
    """Return the path of the events of a task's run."""
    return next(
        path for folder in task.source.parents if (path := folder / "events.jsonl").exists()
    )


def first_time(diary, what):
    """Return whether an event is not in the diary yet, and note the event."""
    before = diary.read_text() if diary.exists() else ""
    diary.write_text(before + f"{what} {os.getpid()}\n")
    return what not in before
