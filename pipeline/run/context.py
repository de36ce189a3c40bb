"""Declare stages, and the context of a run that stages share."""

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

    `upstream` holds the stage directories that this run has finished or kept. With `read_only`
    nothing is written to the run and no weights are downloaded.
    """

    resolved: ResolvedRun
    run: RunDirectory
    console: Console
    executor_name: str = "ray"
    read_only: bool = False
    upstream: dict[str, StageDirectory] = field(default_factory=dict)
    directories: dict[Path, StageDirectory] = field(default_factory=dict)  # locked until the end

    @property
    def config(self) -> Config:
        """The configuration of the run."""
        return self.resolved.config

    @property
    def target(self) -> TargetSpec:
        """The run's target, in the dtype of its workers."""
        return self.resolved.target

    @functools.cached_property
    def executor(self) -> Executor:
        """The run's executor, started when the run first needs one."""
        return make_executor(self.executor_name)

    def resolve_on_cluster(self) -> None:
        """Resolve the run for the Ray cluster at RAY_ADDRESS or already connected, if any."""
        ray = sys.modules.get("ray")
        cluster = os.environ.get("RAY_ADDRESS") or (ray and ray.is_initialized())
        if self.executor_name == "ray" and cluster:
            self.resolved = self.resolved.on(self.executor.resources())

    def close(self) -> None:
        """End the run: stop its executor and release the locks of its stage directories."""
        if "executor" in self.__dict__:
            self.executor.close()
        for directory in self.directories.values():
            directory.release()

    @functools.cached_property
    def digests(self) -> FileDigests:
        """The sha256 of files that the run reads, cached in its store."""
        return FileDigests(self.run.store / "digests.json", read_only=self.read_only)

    def report_damage(self, stage: StageDirectory, damaged: Sequence[Path]) -> None:
        """Print and log the damaged files of a stage of the run, if any; they are made again."""
        if damaged:
            names = [str(path.relative_to(stage.path)) for path in damaged]
            self.run.event("damaged", stage=stage.stage, files=names)
            line = f"{len(names)} damaged, made again: {', '.join(names[:3])}"
            print_stage(self.console, "[yellow]![/]", stage.stage, line)

    def backbone(self, stage: str) -> TargetSpec:
        """Return the model under the run's heads: the target, or the one that `stage` tuned."""
        if not self.resolved.method.tunes_backbone:
            return self.target
        tuned = str(self.upstream[stage].path / BACKBONE_DIRECTORY)
        return replace(self.target, model=tuned, revision=None)

    def weights_identity(self, spec: TargetSpec) -> Identity:
        """Return by file name the sha256 of the files of a model of the run that is not its target.

        Weights of a Hub model are downloaded first, unless the context is read-only.
        """
        return self.digests.of_all(weight_files(spec, fetch=not self.read_only))

    @functools.cached_property
    def target_identity(self) -> Identity:
        """The run's target in a stage fingerprint: file hashes, dtype, quantization, template.

        Raises:
            EnvironmentFault: Its weights would have to be downloaded first, and the context is
                read-only.
        """
        return self._identify_target(fetch=not self.read_only)

    def _identify_target(self, *, fetch: bool) -> Identity:
        """Hash the files of the run's target, and collect the settings that change its text."""
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
        """Hash the files of the run's target again, offline, if the run has hashed them before.

        Raises what `target_identity` raises.
        """
        if "target_identity" in self.__dict__:
            self.target_identity = self._identify_target(fetch=False)

    def placement(self, section: str) -> Placement:
        """Place the run's workers of a `placement` section; raise if they never fit."""
        return self.resolved.on(self.executor.resources()).placement(section)

    def call(
        self,
        function: Callable[..., Any],
        section: str,
        progress: ProgressReporter,
        /,
        **arguments: Any,
    ) -> Any:
        """Call a function on a worker placed by the run's `placement` section; return its result.

        The number of the worker's GPUs is added to the arguments as `gpus`.
        """
        placement = self.placement(section)
        arguments["gpus"] = placement.gpus
        return self.executor.call(function, arguments, placement, progress)

    @contextlib.contextmanager
    def progress(self, stage: StageDirectory) -> Iterator[ProgressReporter]:
        """Context manager: a progress reporter for one stage of the run, shown by a meter."""
        with Meter(self.console, stage.stage) as meter:
            progress = ProgressReporter(stage.path.absolute() / "progress.tmp", meter.show)
            try:
                yield progress
            finally:
                progress.close()


def skipped_stages(config: Config) -> dict[str, str]:
    """Return the stages that a run of this configuration skips, each with its reason or ""."""
    method = method_of(config.train)
    skipped = dict(method.skipped_stages(config.train))
    if not method.tunes_backbone:
        skipped["tuned-features"] = ""
    if not config.push.asks_for_something:
        skipped["push"] = ""
    return skipped


@dataclass(frozen=True)
class Stage:
    """Declaration of a pipeline stage, whose result lies in a directory of its own."""

    name: str
    version: int  # of the code; raised when it makes something else of the same input
    upstream: Callable[[Config], tuple[str, ...]]
    """The stages that it reads; a sharded stage has a shard for each of the first one's."""
    identity: Callable[[Context], Identity]  # what its result depends on besides them
    run: Callable[[Context, StageDirectory], Summary]  # makes the result exist
    figures: tuple[str, ...]  # keys of the summary to print at the end; a dot leads into a section
    sharded: bool = False  # the result is shards
    scratch: tuple[str, ...] = ()  # files and folders that do not count once the stage is done
    parts: tuple[str, ...] = ()  # folders that are made again alone when a file is damaged

    def identity_of(self, context: Context) -> Identity:
        """Collect the stage's identity in a run: code version, settings and upstream stages."""
        upstream = {}
        for name in self.upstream(context.config):
            upstream[name] = context.upstream[name].fingerprint
        return {"version": self.version, "settings": self.identity(context), "upstream": upstream}

    def one_line(self, summary: Summary) -> str:
        """Format a finished stage's figures for its line in the run's terminal output."""
        parts = []
        for key in self.figures:
            value: Any = summary
            for name in key.split("."):
                value = (value or {}).get(name)
            if value is not None:
                text = value if isinstance(value, str) else f"{value:,.10g}"
                parts.append(f"{name.replace('_', ' ')} {text}")
        return ", ".join(parts)

    def locate(self, context: Context) -> StageDirectory:
        """Return the stage's directory in the run's store, named by its fingerprint."""
        meaning = fingerprint({"stage": self.name, **self.identity_of(context)})
        directory = StageDirectory(
            context.run.store, self.name, meaning, scratch=self.scratch, parts=self.parts
        )
        return context.directories.setdefault(directory.path, directory)

    def contents(self, context: Context) -> dict[str, str]:
        """Return the content hashes of the stage's upstream results in this run, by stage name."""
        return {name: context.upstream[name].content for name in self.upstream(context.config)}


def reads(*names: str) -> Callable[[Config], tuple[str, ...]]:
    """Return a function for `Stage.upstream` that names these stages for every configuration."""
    return lambda config: names
