"""A run's directory: run.yaml, events, the lock, and links to stage directories.

Stage directories are in the run directory, or in a `store` that several runs share.
`latest/<stage>` is a relative link to a stage's current directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

from pipeline.config import Config
from pipeline.config.load import RUN_FILE, dump_config, load_config
from pipeline.errors import ConfigError, DataError
from pipeline.redact import redacted_values
from pipeline.storage.atomic import disk_errors, write_text
from pipeline.storage.locks import Lock
from pipeline.storage.stage_directory import StageDirectory

EVENTS = "events.jsonl"
LATEST_EXPORT = "latest/export"

CACHES = ("features", "row-features", "tuned-features")  # stages whose results may be deleted


class RunDirectory:
    """The directory of a run.

    Its stage directories are in `store`, which is the run directory itself by default.
    """

    def __init__(self, path: Path, store: Path | None = None):
        self.path = path
        self.store = store or path

    @classmethod
    def create(cls, config: Config) -> RunDirectory:
        """Return the run directory of a configuration; create it and its store if missing.

        Raises:
            EnvironmentFault: A directory cannot be created.
        """
        run = cls(config.run.directory, config.run.store)
        for path in (run.path, run.store):
            with disk_errors(path):
                path.mkdir(parents=True, exist_ok=True)
        return run

    def write_config(self, config: Config) -> None:
        """Write the run's configuration to run.yaml; the caller must hold the lock."""
        write_text(self.path / "run.yaml", dump_config(config))

    @classmethod
    def open(cls, path: Path) -> tuple[RunDirectory, Config]:
        """Return the run directory at `path`, which may be a copy, and its configuration.

        Raises:
            ConfigError: There is no run.yaml, or it is invalid.
        """
        if not (path / "run.yaml").is_file():
            raise ConfigError(
                "There is no run here: no run.yaml.",
                path,
                "Pass the directory that `run` printed, such as runs/demo.",
            )
        config = load_config(path / "run.yaml")
        return cls(path.resolve(), config.run.store), config

    def latest(self, name: str) -> StageDirectory | None:
        """Return the current directory of a stage, or None if the run has not reached the stage."""
        link = self.path / "latest" / name
        return StageDirectory.at(link.resolve()) if link.is_dir() else None

    def stages(self) -> dict[str, StageDirectory]:
        """Return the directories of the stages that the run has reached, upstream first."""
        found = {}
        for link in self.links():
            stage = self.latest(link.name)
            if stage:
                found[link.name] = stage
        order = TopologicalSorter[str]()
        for name, stage in found.items():
            order.add(name, *(found.keys() & stage.identity.get("upstream", ())))
        return {name: found[name] for name in order.static_order()}

    def links(self) -> list[Path]:
        """Return the run directory's links `latest/<stage>`, sorted by name."""
        return sorted(path for path in (self.path / "latest").glob("[!.]*") if path.is_symlink())

    def link_latest(self, stage: StageDirectory) -> None:
        """Create or atomically replace the relative link `latest/<stage>` to a stage directory."""
        links = self.path / "latest"
        links.mkdir(exist_ok=True)
        temporary = links / f".{stage.stage}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(stage.path, links), target_is_directory=True)
        os.replace(temporary, links / stage.stage)

    def unlink_latest(self, name: str) -> None:
        """Remove the link `latest/<name>` of a stage, if it exists."""
        (self.path / "latest" / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context manager that locks the run directory and removes files of killed processes.

        Raises:
            EnvironmentFault: Another process holds the lock, or the file system has no locks.
        """
        with Lock(self.path / "lock", f"the run '{self.path.name}'") as lock:
            lock.own()
            for link in (self.path / "latest").glob(".*.*"):
                if link.is_symlink():
                    link.unlink()
            for leftover in self.path.glob(f"*.{'[0-9a-f]' * 12}.tmp"):
                leftover.unlink(missing_ok=True)
            yield

    def event(self, kind: str, **facts: Any) -> None:
        """Append an event with the current time to events.jsonl; secrets are redacted."""
        event = redacted_values({"time": round(time.time(), 3), "event": kind, **facts})
        line = json.dumps(event, ensure_ascii=False, default=str)
        with (self.path / EVENTS).open("a", encoding="utf-8", errors="replace") as file:
            file.write(f"{line}\n")

    def require_one_history(self) -> None:
        """Check that each stage was made from the current results of its upstream stages.

        Otherwise the model card would be wrong, for example after `run --until train` with another
        setting. The push stage is not checked, and the stages in `CACHES` may be missing.

        Raises:
            DataError: A stage is unfinished or missing, or was made from another upstream result.
        """
        fix = "Run the same configuration again, and then push."
        stages = self.stages()
        stages.pop("push", None)
        for name, stage in stages.items():
            if stage.done is None:
                raise DataError(f"The stage {name} is not finished.", stage.path, fix)
            for source, content in stage.done.upstream.items():
                if source not in stages and source in CACHES:
                    continue
                if source not in stages or stages[source].content != content:
                    raise DataError(
                        f"The stage {source} is missing or not the one that {name} was made from.",
                        self.path / "latest" / source,
                        fix,
                    )


def export_of(source: Path) -> Path:
    """Return the latest export of a run's directory, or the directory itself; see `run_of`."""
    run = run_of(source)
    return source if run is None else run / LATEST_EXPORT


def run_of(source: Path) -> Path | None:
    """Return the run of a run's directory or of its `latest/export`; None for other exports.

    Raises:
        ConfigError: There is no such directory, or the run has no export yet.
    """
    if not source.is_dir():
        fix = "Give a run's directory, or an export."
        raise ConfigError("There is no such directory.", source, fix)
    above = source.absolute().parent.parent
    for run, export in ((source, source / LATEST_EXPORT), (above, source)):
        latest = run / LATEST_EXPORT
        if latest.is_dir() and export.is_dir() and latest.samefile(export):
            return run
    if (source / RUN_FILE).is_file():
        fix = f"Continue it: medusa-distill run {source}"
        raise ConfigError("This run has no export yet.", source, fix)
    return None
