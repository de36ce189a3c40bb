"""Drivers and orphaned workers in processes that die or wait at a chosen write."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path

import psutil

from tests.forks import FORKS, PATIENCE


def die(*_):
    """Kill this process without handlers, `finally` or flushes."""
    os.kill(os.getpid(), signal.SIGKILL)


def lose_node():
    """Kill the raylet of this worker's Ray node, which ends the worker too."""
    raylet = psutil.Process(os.getppid())
    assert raylet.name() == "raylet"
    raylet.kill()
    time.sleep(PATIENCE)


def at(moment, pattern, act):
    """Patch this process to act once, when a file whose path matches `pattern` is written.

    Args:
        moment: `open` and `write`: of a shard, before its temporary file is there and after a row
            group is in it; `rename` and `renamed`: of any file, before its temporary one gets its
            name and after.
    """
    from pipeline.storage.shards import ShardWriter

    of_a_shard = {"open": "__enter__", "write": "write_batch"}
    owner, name = (ShardWriter, of_a_shard[moment]) if moment in of_a_shard else (os, "replace")
    real, waiting = getattr(owner, name), [act]

    def patched(first, *rest, **options):
        path = Path(rest[0]) if owner is os else first.path
        now = waiting.pop() if waiting and path.match(pattern) else None
        if now and moment in ("open", "rename"):
            now()
        result = real(first, *rest, **options)
        if now and moment in ("write", "renamed"):
            now()
        return result

    setattr(owner, name, patched)


def run_until_killed(config, moment, pattern):
    """Run a config in a process that is killed at a write; return the exit code."""
    driver = FORKS.Process(target=_drive, args=(config, moment, pattern))
    driver.start()
    driver.join(PATIENCE)
    return driver.exitcode


def _drive(config, moment, pattern):
    from pipeline.cli.app import main

    at(moment, pattern, die)
    sys.argv = ["medusa-distill", "run", str(config), "--executor", "inline"]
    main()


class Orphan:
    """A stage's worker without a driver or a lock, which makes one shard and stops on request."""

    def __init__(self, config, stage, index):
        self._line, theirs = FORKS.Pipe()
        self.process = FORKS.Process(target=_work_alone, args=(config, stage, index, theirs))
        self.process.start()
        theirs.close()
        assert self._hears() == "open"

    def begin(self):
        """Let the orphan write its temporary file, and stop it there."""
        self._line.send("go on")
        assert self._hears() == "write"

    def commit(self):
        """Let the orphan commit its shard; return its exit code."""
        self._line.send("go on")
        self.process.join(PATIENCE)
        return self.process.exitcode

    def _hears(self):
        assert self._line.poll(PATIENCE), "the orphan says nothing"
        return self._line.recv()


def _work_alone(config, name, index, line):
    """Run a stage's worker on one shard without a driver."""
    from rich.console import Console

    from pipeline.config.load import load_config
    from pipeline.flow import STAGES
    from pipeline.run.context import Context
    from pipeline.run.resolved import resolve_run
    from pipeline.storage.run_directory import RunDirectory

    def stop(moment):
        line.send(moment)
        line.recv()

    for moment in ("open", "write"):
        at(moment, f"{name}-*/shards/{index:05d}.parquet", lambda moment=moment: stop(moment))
    settings, module = load_config(config, ()), importlib.import_module(f"pipeline.stages.{name}")
    run = RunDirectory.create(settings)
    resolved = resolve_run(settings, tuple(STAGES))
    context = Context(resolved, run, Console(quiet=True), "inline", read_only=True)
    for earlier in list(STAGES)[: list(STAGES).index(name)]:
        context.upstream[earlier] = STAGES[earlier].locate(context)

    def only_one(
        context,
        stage,
        upstream,
        worker,
        arguments,
        *_,
        **__,
    ):
        worker(**arguments)(stage.tasks(upstream, upstream.receipts())[index])
        os._exit(0)

    module.run_sharded = only_one
    module.run(context, STAGES[name].locate(context))


class Waiting:
    """A driver that waits for good at given places, and reports them.

    Args:
        places: `generate` is before its second shard's file, `train` in its second step, `end` is
            when it gives back what it holds.
    """

    def __init__(self, config, said, *places):
        self._line, theirs = FORKS.Pipe()
        self._said = said
        self.process = FORKS.Process(target=_drive_and_wait, args=(config, said, places, theirs))
        self.process.start()

    def is_at(self, place):
        assert self._line.poll(PATIENCE), f"the driver never came to {place}"
        return self._line.recv() == place

    def send(self, signum):
        assert self.process.pid is not None
        os.kill(self.process.pid, signum)

    def go_on(self):
        self._line.send("go on")

    def end(self):
        """Wait for the driver's end; return its exit code and its stderr."""
        self.process.join(PATIENCE)
        return self.process.exitcode, self._said.read_text()


def _drive_and_wait(config, said, places, line):
    from pipeline.cli.app import main
    from pipeline.run.context import Context
    from pipeline.training.trainer import Trainer

    def wait(place):
        line.send(place)
        line.poll(PATIENCE)

    steps, step, close = itertools.count(1), Trainer.step, Context.close

    def step_or_wait(*arguments):
        if next(steps) == 2:
            wait("train")
        return step(*arguments)

    def wait_and_close(self):
        wait("end")
        close(self)

    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
    if "generate" in places:
        at("open", "generate-*/shards/00001.parquet", lambda: wait("generate"))
    if "train" in places:
        Trainer.step = step_or_wait
    if "end" in places:
        Context.close = wait_and_close
    sys.argv = ["medusa-distill", "run", str(config), "--executor", "inline"]
    main()
