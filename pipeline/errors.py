"""Errors for users; each class has an exit code.

An error is one paragraph: what happened, where, and what to do. The three parts are separate
attributes, for tests, logs and the terminal. Errors cross process borders, so each class is pickled
by its constructor arguments.
"""

from __future__ import annotations

import signal
from pathlib import Path

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # the signals that stop a run
KEPT = "Finished stages and committed shards are kept; the same command continues."


class MedusaDistillError(Exception):
    """The base of all errors that are shown to users.

    Args:
        what: What happened, as a full sentence.
        where: The file, key, row or stage where it happened.
        fix: The remedy, as a full sentence.
    """

    exit_code = 1

    def __init__(self, what: str, where: str | Path | None = None, fix: str | None = None):
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        parts = [self.what.rstrip()]
        if self.where:
            parts = [f"{self.what.rstrip('. ')} ({self.where})."]
        if self.fix:
            parts.append(self.fix)
        return " ".join(parts)


class CheckFailed(MedusaDistillError):
    """A failed or missing check of heads, or damage that `verify` found in a run's files."""

    exit_code = 1


class ConfigError(MedusaDistillError, ValueError):
    """An error in the configuration, the command line, or something that they name."""

    exit_code = 2


class DataError(MedusaDistillError, ValueError):
    """Invalid or damaged data, or too many quarantined rows."""

    exit_code = 3


class DamagedShard(DataError):
    """A missing or unreadable shard; a run that reads the shard rebuilds it once."""

    def __init__(self, path: str | Path, detail: str):
        super().__init__(
            f"A shard cannot be read: {detail.rstrip('.')}.",
            path,
            "Delete this file and run the same command again to rebuild it.",
        )
        self.args = (path, detail)


class EnvironmentFault(MedusaDistillError, RuntimeError):
    """A fault of the environment: disk, GPU, engine, cluster, network or a held lock."""

    exit_code = 4


class Interrupted(MedusaDistillError):
    """The clean end of a command or run by a signal; the exit code is 128 plus its number."""

    def __init__(self, signum: int, fix: str | None = None):
        super().__init__(f"Stopped by {signal.Signals(signum).name}.", fix=fix)
        self.args = (signum, fix)
        self.exit_code = 128 + signum


class StoppedAtCheckpoint(MedusaDistillError):
    """The requested stop of a training; the text names the last step."""
