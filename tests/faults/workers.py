"""Workers that end their own process, in the place of a stage's: what a Ray worker imports of these
tests.

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
from pipeline.storage.shards import read_rows, shard_writer, task_rows
from tests.faults.processes import at, die, lose_node
from tests.forks import PATIENCE

WORKERS = 2  # that share a stage's work
MIDDLE = 1  # the shard in which a worker is killed once
STEPS_BEFORE_DEATH = 2


class Stand:
    """A worker that asks `before` about each task and leaves the work to the stage's own.

    Args:
        stage: The stage's name.
    """

    def __init__(self, stage, **arguments):
        self.stage, self._arguments = stage, arguments
        self._real: Any = None

    def __call__(self, task):
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
    """A worker that begins once as many as there are to be have come, each in its own process."""

    def before(self, task):
        come = events_of(task).with_name("come")
        come.mkdir(exist_ok=True)
        (come / str(os.getpid())).touch()
        patience = time.monotonic() + PATIENCE
        while len(list(come.iterdir())) < WORKERS:
            assert time.monotonic() < patience, "some workers never came"
            time.sleep(0.02)


class Copying(Stand):
    """A worker of `generate` that writes what the finished run's had written, whose stage
    `finished.txt` beside the run
    names: as many deaths as one likes, and torch is never loaded."""

    def __init__(self, **arguments):
        super().__init__("generate", **arguments)

    def __call__(self, task):
        self.before(task)
        finished = Path(diary_of(task, "finished").read_text())
        rows = [row for shard in sorted(finished.glob("shards/*")) for row in read_rows(shard)]
        rejected = {}
        for file in finished.glob("quarantine/*"):
            for line in map(json.loads, file.read_text().splitlines()):
                rejected[line["id"]] = line
        seeds = task_rows(task, ["id"])
        with shard_writer(task, GENERATED) as writer:
            for seed in seeds:
                if line := rejected.get(seed["id"]):
                    writer.reject(
                        RejectedRow(line["id"], Reason(line["reason"]), line["detail"], line["row"])
                    )
            ids = {seed["id"] for seed in seeds}
            writer.write([row for row in rows if row["parent_id"] in ids])
            made = read_receipt(finished / "shards" / f"{task.index:05d}.parquet")
            assert made is not None
            return writer.commit("generate", [*task.crashing, *ids], made.stats, 0.1)


class KilledOnce(Stand):
    """Its process is killed when a row group of shard `MIDDLE` is in the temporary file, the first
    time.
    """

    def before(self, task):
        if task.index == MIDDLE and first_time(diary_of(task, self.stage), "killed"):
            at("write", f"{self.stage}-*/shards/{task.index:05d}.parquet", die)


class CopyingKilledOnce(KilledOnce, Copying):
    """The same of a worker that copies."""


class LosesItsNode(Copying):
    """Its node's raylet is killed, and with it whatever runs there, when a row group of shard
    `MIDDLE` is in the temporary file, the first time. Who works on a later shard is busy until that
    is known."""

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
    """A row ends its process wherever it is; its id is in `crashing.txt` beside the run."""

    def before(self, task):
        if diary_of(task, "crashing").read_text() in {row["id"] for row in task_rows(task, ["id"])}:
            die()


def killed_trainer(config):
    """Run a training worker and record its steps; kill the last one once, in its third step."""
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
    """`train_on_ray` with workers of which one is killed."""
    from pipeline.training import ray_entry

    ray_entry.run_worker = killed_trainer  # in a Ray task's own process
    return ray_entry.train_on_ray(**arguments)


def diary_of(task, name):
    """A file beside the run directory that a task's shard lies in, also where it is a trial's."""
    return events_of(task).parent.with_name(f"{name}.txt")


def events_of(task):
    """The events of the run that a task's shard lies in."""
    return next(
        path for folder in Path(task.source).parents if (path := folder / "events.jsonl").exists()
    )


def first_time(diary, what):
    """Whether this is not in the diary yet; then it is."""
    before = diary.read_text() if diary.exists() else ""
    diary.write_text(before + f"{what} {os.getpid()}\n")
    return what not in before
