"""What a stage is given: configuration, run, upstream stages, executor and placement, terminal."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from pipeline.config import Config
from pipeline.execution.executor import Executor, InlineExecutor, make_executor
from pipeline.execution.placement import Placement, place
from pipeline.execution.progress import Meter, ProgressReporter
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.run.placements import sections_of, unfinished
from pipeline.storage.fingerprint import FileDigests
from pipeline.storage.receipts import Identity
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import TargetSpec, asks_for_date, resolve, weight_files
from pipeline.training.methods import method_of


@dataclass
class Context:
    """Shared by the stages of one run. `upstream` fills up as stages finish.

    With `read_only` nothing is written to the run and no weights are downloaded.
    """

    config: Config
    run: RunDirectory
    console: Console
    executor_name: str = "ray"
    read_only: bool = False
    upstream: dict[str, StageDirectory] = field(default_factory=dict)
    directories: dict[Path, StageDirectory] = field(default_factory=dict)

    @functools.cached_property
    def executor(self) -> Executor:
        """Started when the first stage needs it, so that a finished run starts nothing."""
        return make_executor(self.executor_name)

    def directory(self, name: str, fingerprint: str, **layout: tuple[str, ...]) -> StageDirectory:
        """A stage's directory, one object for each: it keeps its lock until the run's end."""
        directory = StageDirectory(self.run.store, name, fingerprint, **layout)
        return self.directories.setdefault(directory.path, directory)

    def close(self) -> None:
        """Stop the executor and release the locks."""
        if "executor" in self.__dict__:
            self.executor.close()
        for directory in self.directories.values():
            directory.release()

    @functools.cached_property
    def digests(self) -> FileDigests:
        return FileDigests(self.run.store / "digests.json", read_only=self.read_only)

    def on_gpu(self, section: str) -> bool | None:
        """Whether the workers of a section have GPUs, as placement says, or the cluster that
        RAY_ADDRESS names.

        None: as this machine. `dtype: auto` depends on it, of the target and of its copies.
        """
        gpus = self.config.placement.of_stages()[section].gpus_per_worker
        on_cluster = (
            self.executor_name == "ray" and os.environ.get("RAY_ADDRESS") and not self.read_only
        )
        if gpus is None and on_cluster:
            gpus = self.executor.resources().gpus
        return None if gpus is None else gpus > 0

    @functools.cached_property
    def target(self) -> TargetSpec:
        """The target, with what the configuration leaves open filled in from the model.

        Raises:
            ConfigError: There is no such target, or it cannot be accelerated by tree verification.
        """
        return resolve(self.config.target, on_gpu=self.on_gpu("features"))

    def backbone(self, stage: str) -> TargetSpec:
        """What the heads sit on: the target itself, or the one that training has tuned, in the
        directory of `stage`.
        """
        if not method_of(self.config.train).tunes_backbone:
            return self.target
        return replace(
            self.target, model=str(self.upstream[stage].path / BACKBONE_DIRECTORY), revision=None
        )

    @functools.cached_property
    def target_identity(self) -> Identity:
        """The target's part of a fingerprint: the content of its files, not their paths.

        Raises:
            EnvironmentFault: Its weights would have to be downloaded first, and the context is
                read-only.
        """
        return self._identify_target(fetch=not self.read_only)

    def _identify_target(self, *, fetch: bool) -> Identity:
        spec = self.target
        paths = weight_files(spec, fetch=fetch)
        return {
            "files": self.digests.of_all(paths),
            "dtype": spec.dtype,
            "quantization": spec.quantization,
            "max_tokens": spec.max_tokens,
            "chat_template": spec.chat_template,
            **({"template_arguments": spec.template_arguments} if spec.template_arguments else {}),
            **({"date": spec.date} if asks_for_date(spec, paths) else {}),
        }

    def look_again(self) -> bool:
        """Look at the target's files anew; whether they are what they were when they were first
        looked at.

        The Hub is not asked: what was downloaded is of one commit. Raises what `target_identity`
        raises.
        """
        before = self.__dict__.get("target_identity")
        return bool(before is None or before == self._identify_target(fetch=False))

    def placement(self, stage: str) -> Placement:
        """The workers of `stage`; raises `EnvironmentFault` when the cluster can never fit them."""
        return place(stage, getattr(self.config.placement, stage), self.executor.resources())

    def check_placements(self, stages: Collection[str], fresh: str | None = None) -> None:
        """Refuse workers that can never be placed.

        A stage with a finished result in the store is not checked, since it may be kept, except
        `fresh`.

        Raises:
            EnvironmentFault: The sum, spelled out.
        """
        missing = unfinished(self.config, stages, fresh)
        if not missing:
            return
        ray = sys.modules.get("ray")
        cluster = os.environ.get("RAY_ADDRESS") or (ray and ray.is_initialized())
        on_cluster = self.executor_name == "ray" and cluster
        have = (
            self.executor.resources() if on_cluster else InlineExecutor().resources()
        )  # as Ray will find them here
        sections = sections_of(self.config, missing)
        for name, wanted in self.config.placement.of_stages().items():
            if name in sections:
                place(name, wanted, have)

    @contextlib.contextmanager
    def progress(self, stage: StageDirectory) -> Iterator[ProgressReporter]:
        """A reporter for the work of one stage, also in other processes, whose reports a meter
        shows.
        """
        with Meter(self.console, stage.stage) as meter:
            progress = ProgressReporter(stage.path.absolute() / "progress.tmp", meter.show)
            try:
                yield progress
            finally:
                progress.close()
