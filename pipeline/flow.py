"""The order of the stages, and a run from top to bottom.

A stage is a module with the same few names: `NAME`, `VERSION`, `UPSTREAM` (or `upstream(config)`, where the method
decides what it reads), `identity(context)` (what its result depends on) and `run(context, directory)` (make it exist,
return a summary). A stage whose DONE.json stands, whose files are as it says and whose upstream still has the content
it was made from is not run again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

from pipeline.config import Config
from pipeline.errors import CheckFailed, ConfigError, DamagedShard
from pipeline.execution.executor import check_executor
from pipeline.execution.progress import duration
from pipeline.run.context import Context
from pipeline.run.identity import identity_of, locate, upstream_of
from pipeline.run.preflight import check_config, unread_settings
from pipeline.run.reporting import publish_report
from pipeline.stages import calibrate, check, export, features, generate, push, seeds, train
from pipeline.storage.atomic import disk_errors
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from pipeline.training.methods import method_of

STAGES: dict[str, ModuleType] = {
    stage.NAME: stage for stage in (seeds, generate, features, train, calibrate, export, check, push)
}


def run_flow(
    config: Config,
    stages: Sequence[str] = tuple(STAGES),
    *,
    until: str | None = None,
    executor: str = "ray",
    fresh: str | None = None,
    console: Console | None = None,
) -> RunDirectory:
    """Run the stages in order; whatever is finished already is kept.

    Args:
        config: The resolved configuration.
        stages: Names of stages, upstream first. `push` runs only with a `push.repo_id`.
        until: Stop after this stage.
        executor: `ray` or `inline`.
        fresh: Throw away this stage's result and make it again.

    Raises:
        MedusaDistillError: With the exit code that fits; what was committed is kept, and the same call continues.
    """
    console = console or Console(stderr=False)
    wanted = _wanted(config, stages, until, fresh)
    check_executor(executor)
    check_config(config, wanted)
    for warning in unread_settings(config):
        console.print(f"[yellow]![/] {warning}", highlight=False, soft_wrap=True)
    run = RunDirectory.create(config)
    with disk_errors(run.path), run.locked():
        run.write_config(config)
        context = Context(config, run, console, executor)
        try:
            # the workers of features also calibrate and check
            context.check_placements({*wanted, "features"} if "calibrate" in wanted else wanted)
            for name in method_of(config.train).skipped(config.train):
                run.unlink_latest(name)
            run.event("run-started", stages=wanted, executor=executor)
            advance_all(context, wanted, fresh)
        finally:
            context.close()
        run.event("run-finished")
    return run


def advance_all(context: Context, wanted: Sequence[str], fresh: str | None) -> None:
    """Bring stages up to date, one after another; a shard that turns out damaged when it is read is made again."""
    discarded: set[str] = set()
    position = 0
    while position < len(wanted):
        name = wanted[position]
        try:
            advance(context, STAGES[name], fresh=name == fresh)
            position += 1
        except DamagedShard as damaged:
            owner = _owner(context, damaged)
            if owner is None or str(damaged.where) in discarded:
                raise
            discarded.add(str(damaged.where))
            context.lock(owner).own()
            _discard(context, owner, [Path(str(damaged.where))])
            position, fresh = wanted.index(owner.stage), None


def advance(context: Context, stage: ModuleType, *, fresh: bool = False) -> StageDirectory:
    """Bring one stage up to date and link it as the latest; from then on the run holds it against being changed."""
    directory = locate(context, stage)
    directory.create(identity_of(context, stage))
    context.run.link_latest(directory)
    upstream = {name: context.upstream[name].content for name in upstream_of(stage, context.config)}
    lock = context.lock(directory)
    lock.share()
    directory.clean()
    if fresh or not directory.is_current(upstream) or directory.examine():
        lock.own()
        if fresh:
            directory.drop()
        elif damaged := directory.examine():
            _discard(context, directory, damaged)
        _run_stage(context, stage, directory, upstream)
        lock.share()
    else:
        context.console.print(f"[green]✓[/] {stage.NAME:<10} kept       {directory.path.name}", highlight=False)
    directory.require_own_shards()
    context.upstream[stage.NAME] = directory
    if stage is check:
        publish_report(context)
        check.verdict(directory, context.config)
    return directory


def _owner(context: Context, damaged: DamagedShard) -> StageDirectory | None:
    """The stage that made a shard, if it is one of this run's."""
    folder = Path(str(damaged.where)).parent.parent
    return next((stage for stage in context.upstream.values() if stage.path in (folder, folder.parent)), None)


def _discard(context: Context, stage: StageDirectory, damaged: Sequence[Path]) -> None:
    names = [str(path.relative_to(stage.path)) for path in damaged]
    context.run.event("damaged", stage=stage.stage, files=names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    context.console.print(f"[yellow]![/] {stage.stage:<10} damaged, made again: {', '.join(names[:3])}{more}")
    stage.discard(damaged)


def _run_stage(context: Context, stage: ModuleType, directory: StageDirectory, upstream: dict[str, str]) -> None:
    directory.prepare(upstream)
    context.run.event("stage-started", stage=stage.NAME, fingerprint=directory.fingerprint)
    started = time.monotonic()
    summary = stage.run(context, directory)
    seconds = round(time.monotonic() - started, 3)
    directory.finish({**summary, "seconds": seconds}, upstream)
    context.run.event("stage-finished", stage=stage.NAME, seconds=seconds)
    context.console.print(
        f"[green]✓[/] {stage.NAME:<10} {duration(seconds):<10} {stage.one_line(summary)}",
        highlight=False,
        soft_wrap=True,
    )


def push_run(
    path: Path,
    *,
    repo_id: str | None,
    private: bool,
    base_model: str | None,
    dry_run: bool,
    console: Console | None = None,
) -> dict[str, Any]:
    """Push a finished run's export, as the push stage would; `dry_run` only says what would go.

    Raises:
        CheckFailed: The check failed, or was of other heads.
        ConfigError: There is no export, or no repo_id.
    """
    run, config = RunDirectory.open(path)
    wanted = {"repo_id": repo_id, "private": private or None, "base_model": base_model}
    config = config.model_copy(
        update={"push": config.push.model_copy(update={k: v for k, v in wanted.items() if v is not None})}
    )
    console = console or Console()
    if not config.push.repo_id:
        raise ConfigError("There is no repository to push to.", "push.repo_id", "Give --repo-id USER/NAME.")
    context = Context(config, run, console, "inline")
    for name in push.UPSTREAM:
        stage = run.latest(name)
        if stage is None or not stage.done:
            raise ConfigError(
                f"This run has no finished {name} stage.",
                str(path),
                f"Run it first: medusa-distill run {path / 'run.yaml'}",
            )
        context.upstream[name] = stage
    export, checked = (context.upstream[name] for name in push.UPSTREAM)
    check.verdict(checked, config)
    if (checked.done or {})["upstream"].get(export.stage) != export.content:
        fix = f"Run it: medusa-distill run {path / 'run.yaml'}"
        raise CheckFailed("The check has not seen these heads.", str(export.path), fix)
    if dry_run:
        receipt = push.push(context, dry_run=True)
        push.print_dry_run(console, receipt)
        return receipt
    with run.locked():
        try:
            return advance(context, push).summary
        finally:
            context.close()


def _wanted(config: Config, stages: Sequence[str], until: str | None, fresh: str | None) -> list[str]:
    for name, option in ((until, "--until"), (fresh, "--fresh")):
        if name is not None and name not in stages:
            raise ConfigError(f"There is no stage '{name}'.", option, f"The stages are {', '.join(stages)}.")
    upto = stages[: stages.index(until) + 1] if until else stages
    left_out = {*method_of(config.train).skipped(config.train), *(() if config.push.repo_id else ("push",))}
    wanted = [name for name in upto if name not in left_out]
    if fresh is not None and fresh not in wanted:
        raise ConfigError(f"The stage '{fresh}' is not part of this run.", "--fresh", f"It runs {', '.join(wanted)}.")
    return wanted
