"""The context that the stages of a run share, and the declaration of a stage."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config import Config
from pipeline.execution.executor import Executor, make_executor
from pipeline.execution.placement import Placement
from pipeline.execution.progress import Meter, ProgressReporter, print_stage
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.formatting import count, counts
from pipeline.heads.kinds import reads_rows
from pipeline.run.resolved import ResolvedRun
from pipeline.storage.fingerprint import FileDigests, fingerprint
from pipeline.storage.receipts import Identity, Summary
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import TargetSpec, asks_for_date, weight_files
from pipeline.training.methods import method_of


@dataclass
class Context:
    """Shared state of a run's stages: configuration, run directory, executor, console.

    `upstream` holds the directories of the stages that are finished in this run. With `read_only`
    nothing is written to the run and no weights are downloaded.
    """

    resolved: ResolvedRun
    run: RunDirectory
    console: Console = field(default_factory=lambda: Console(quiet=True))
    executor_name: str = "ray"
    read_only: bool = False
    upstream: dict[str, StageDirectory] = field(default_factory=dict)
    directories: dict[Path, StageDirectory] = field(default_factory=dict)  # released by `close`

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.resolved.config

    @property
    def target(self) -> TargetSpec:
        """The spec of the run's target, in the dtype of the workers of `features`."""
        return self.resolved.target

    @functools.cached_property
    def executor(self) -> Executor:
        """The run's executor, started at the first access."""
        return make_executor(self.executor_name)

    def resolve_on_cluster(self) -> None:
        """Resolve the run for the nodes of a Ray cluster, if the executor is Ray and there is one.

        There is a cluster if RAY_ADDRESS is set or this process is connected to one.
        """
        ray = sys.modules.get("ray")
        cluster = os.environ.get("RAY_ADDRESS") or (ray and ray.is_initialized())
        if self.executor_name == "ray" and cluster:
            self.resolved = self.resolved.on(self.executor.resources())

    def close(self) -> None:
        """End the run: stop its executor and release the locks of its stage directories."""
        if "executor" in self.__dict__:
            self.executor.close()
        for directory in self.directories.values():
            directory.lock.release()

    @functools.cached_property
    def digests(self) -> FileDigests:
        """The sha256 digests of files that the run reads, cached in the run's store."""
        return FileDigests(self.run.store / "digests.json", read_only=self.read_only)

    def report_damage(self, stage: StageDirectory, damaged: Sequence[Path]) -> None:
        """Print and log the damaged files of a stage, if any, which the run rebuilds."""
        if damaged:
            names = [str(path.relative_to(stage.path)) for path in damaged]
            self.run.event("damaged", stage=stage.stage, files=names)
            line = f"{len(names)} damaged files are rebuilt: {', '.join(names[:3])}"
            print_stage(self.console, "[yellow]![/]", stage.stage, line)

    def backbone(self, stage: str) -> TargetSpec:
        """Return the model that the heads belong to: the target, or the tuned backbone.

        Args:
            stage: The stage whose directory holds the tuned backbone: `train` or `export`.
        """
        if not self.resolved.method.tunes_backbone:
            return self.target
        tuned = str(self.upstream[stage].path / BACKBONE_DIRECTORY)
        return replace(self.target, model=tuned, revision=None)

    def weights_identity(self, spec: TargetSpec) -> Identity:
        """Return the sha256 of each file that identifies a model, by file name.

        A Hub model that is not on this machine is downloaded, except in a read-only context. Raises
        what `weight_files` raises.
        """
        return self.digests.of_all(weight_files(spec, fetch=not self.read_only))

    @functools.cached_property
    def target_identity(self) -> Identity:
        """The target's part of stage fingerprints: file hashes, and settings that change its text.

        In a read-only context nothing is downloaded. Raises what `weight_files` raises.
        """
        return self._identify_target(fetch=not self.read_only)

    def _identify_target(self, *, fetch: bool) -> Identity:
        """Return the hashes of the target's files, and the settings that change its text.

        With `fetch` a Hub target that is not on this machine is downloaded.
        """
        spec = self.target
        paths = weight_files(spec, fetch=fetch)
        identity = {
            "files": self.digests.of_all(paths),
            "dtype": spec.dtype,
            "quantization": spec.quantization,
            "max_tokens": spec.max_tokens,
            "chat_template": spec.chat_template,
            "template_arguments": spec.template_arguments,
        }
        if asks_for_date(spec, paths):
            identity["date"] = spec.date
        return identity

    def identify_target_again(self) -> None:
        """Compute `target_identity` again, without downloads, if it has been computed before.

        Raises what `weight_files` raises.
        """
        if "target_identity" in self.__dict__:
            self.target_identity = self._identify_target(fetch=False)

    def placement(self, section: str) -> Placement:
        """Place the workers of a `placement` section; raise EnvironmentFault if they never fit."""
        return self.resolved.on(self.executor.resources()).placement(section)

    def call(
        self,
        function: Callable[..., Any],
        section: str,
        progress: ProgressReporter,
        /,
        **arguments: Any,
    ) -> Any:
        """Call a function on a worker of a `placement` section, and return its result.

        The function also receives the arguments `gpus`, the number of the worker's GPUs, and
        `progress`.
        """
        placement = self.placement(section)
        arguments["gpus"] = placement.gpus
        return self.executor.call(function, arguments, placement, progress)

    @contextlib.contextmanager
    def progress(self, stage: StageDirectory) -> Iterator[ProgressReporter]:
        """Context manager: yield a progress reporter for a stage, which a meter displays."""
        with Meter(self.console, stage.stage) as meter:
            progress = ProgressReporter(stage.path.absolute() / "progress.tmp", meter.show)
            progress.close()  # a driver that was killed may have left its files
            try:
                yield progress
            finally:
                progress.close()


def skipped_stages(config: Config) -> dict[str, str]:
    """Return the stages that a run of this configuration skips, with the reason.

    The reason is empty for stages that were not asked for.
    """
    method = method_of(config.train)
    skipped = dict(method.skipped_stages(config.train))
    if not method.tunes_backbone:
        skipped["tuned-features"] = ""
    if not reads_rows(config.train):
        skipped["row-features"] = ""
    if not config.push.repo_id:
        skipped["push"] = ""
    return skipped


@dataclass(frozen=True)
class Stage:
    """Declaration of a pipeline stage, whose result has its own directory."""

    name: str
    version: int  # of the code; raise it when results change
    upstream: Callable[[Config], tuple[str, ...]]
    """Returns the stages that it reads; a sharded stage has one shard per shard of the first."""
    identity: Callable[[Context], Identity]  # what its result depends on besides `upstream`
    run: Callable[[Context, StageDirectory], Summary]  # makes the result and returns the summary
    figures: dict[str, str]
    """Labels of the figures to print at the end, by key of the summary; a dot enters a section."""
    sharded: bool = False  # the result is shards
    scratch: tuple[str, ...] = ()  # files and folders that are not part of the result
    parts: tuple[str, ...] = ()  # folders that are rebuilt alone if a file is damaged

    def identity_of(self, context: Context) -> Identity:
        """Return what the stage's fingerprint covers: code version, settings and upstream."""
        upstream = {}
        for name in self.upstream(context.config):
            upstream[name] = context.upstream[name].fingerprint
        return {"version": self.version, "settings": self.identity(context), "upstream": upstream}

    def one_line(self, summary: Summary) -> str:
        """Format the figures in a finished stage's summary as one line for the terminal.

        A float below 1,000 has 4 significant digits, a larger one no decimals. Quarantined rows are
        followed by their reasons.
        """
        parts = []
        for key, label in self.figures.items():
            value: Any = summary
            for name in key.split("."):
                value = (value or {}).get(name)
            if value is not None:
                if isinstance(value, float) and value < 1000:
                    value = f"{value:.4g}"
                part = f"{label} {count(value)}"
                if key == "quarantined" and summary.get("reasons"):
                    part += f" ({counts(summary['reasons'])})"
                parts.append(part)
        return ", ".join(parts)

    def locate(self, context: Context) -> StageDirectory:
        """Return the stage's directory in the run's store, named by its fingerprint.

        The directory need not exist yet.
        """
        meaning = fingerprint({"stage": self.name, **self.identity_of(context)})
        directory = StageDirectory(
            context.run.store, self.name, meaning, scratch=self.scratch, parts=self.parts
        )
        return context.directories.setdefault(directory.path, directory)

    def contents(self, context: Context) -> dict[str, str]:
        """Return the content hashes of the stage's upstream results in this run, by stage name."""
        return {name: context.upstream[name].content for name in self.upstream(context.config)}


def reads(*names: str) -> Callable[[Config], tuple[str, ...]]:
    """Return a function for `Stage.upstream` that returns these names for every configuration."""
    return lambda config: names
