"""Run the stages in order.

A stage is kept if it has a DONE.json, its files are unchanged, and it was made from the present
content of its upstream stages. Any other stage is run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.artifacts.check_result import check_failures
from pipeline.config import Config
from pipeline.errors import CheckFailed, ConfigError, DamagedShard, DataError
from pipeline.execution.executor import check_executor
from pipeline.execution.progress import print_stage
from pipeline.formatting import duration
from pipeline.run.checks import check_placements, check_run, warnings
from pipeline.run.context import Context, Stage, skipped_stages
from pipeline.run.estimate import check_memory
from pipeline.run.reporting import publish_report
from pipeline.run.resolved import resolve_run
from pipeline.run.stage_status import StageStatus, stage_statuses
from pipeline.stages import calibrate, check, export, features, generate, push, seeds, train
from pipeline.storage.atomic import disk_errors, require_free_disk
from pipeline.storage.receipts import Summary
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        seeds.STAGE,
        generate.STAGE,
        features.STAGE,
        features.ROWS,
        train.STAGE,
        features.TUNED,
        calibrate.STAGE,
        export.STAGE,
        check.STAGE,
        push.STAGE,
    )
}
"""In the order in which they run."""


def run_flow(
    config: Config,
    stages: Sequence[str] = tuple(STAGES),
    *,
    until: str | None = None,
    executor: str = "ray",
    fresh: str | None = None,
    console: Console | None = None,
) -> RunDirectory:
    """Run the stages in order, keep finished ones, and return the run directory.

    Args:
        config: The validated configuration.
        stages: Names of stages, upstream first. All stages upstream of them are included. `push` is
            skipped without `push.repo_id`.
        until: Stop after this stage.
        executor: `ray` or `inline`.
        fresh: Delete this stage's result and rebuild it.

    Raises:
        MedusaDistillError: The configuration is refused, or a stage or its check fails. Committed
            results are kept, and the same call continues.
    """
    console = console or Console()
    wanted = wanted_stages(config, stages, until, fresh)
    check_executor(executor)
    resolved = resolve_run(config, wanted, fresh)
    check_run(resolved)
    for warning in warnings(resolved):
        console.print(f"[yellow]![/] {warning}", highlight=False, soft_wrap=True)
    check_memory(resolved)
    run = RunDirectory.create(config)
    context = Context(resolved, run, console, executor)
    with disk_errors(run.path), run.locked(), contextlib.closing(context):
        run.write_config(config)
        context.resolve_on_cluster()
        check_placements(context.resolved)
        for name in skipped_stages(config):
            if name != push.NAME:  # `medusa-distill push` may have linked it
                run.unlink_latest(name)
        run.event("run-started", stages=wanted, executor=executor)
        advance_all(context, wanted, fresh)
        run.event("run-finished")
    return run


def advance_all(context: Context, wanted: Sequence[str], fresh: str | None) -> None:
    """Bring the wanted stages up to date in order; go back to a stage if its shard is damaged.

    Args:
        fresh: The stage whose result is deleted first, if any.

    Raises:
        DamagedShard: A shard is damaged again after it was rebuilt, or belongs to no stage of
            the run.
    """
    discarded = set()
    position = 0
    while position < len(wanted):
        name = wanted[position]
        try:
            advance(context, STAGES[name], fresh=name == fresh)
            position += 1
        except DamagedShard as damaged:
            shard = Path(str(damaged.where))
            owner = context.directories.get(shard.parent.parent)
            if owner is None or shard in discarded:
                raise
            discarded.add(shard)
            owner.discard([shard])
            context.report_damage(owner, [shard])
            position = wanted.index(owner.stage)
        finally:
            if name == fresh:
                fresh = None  # so that it is deleted only once


def advance(context: Context, stage: Stage, *, fresh: bool = False) -> StageDirectory:
    """Run a stage unless its result is current; link and return its directory.

    The directory stays locked. After the check stage, the run's report is published.

    Args:
        fresh: Delete the stage's result first.

    Raises:
        CheckFailed: The stage is the check, and its result is not within the limits.
        DataError: The stage's input changed while it ran.
        EnvironmentFault: The stage is to run, and the disk is nearly full.
    """
    directory = stage.locate(context)
    directory.enter(stage.identity_of(context))
    context.run.link_latest(directory)
    upstream = stage.contents(context)
    line = f"kept       {directory.path.name}"
    if fresh or not directory.is_whole(upstream):
        require_free_disk(directory.path, context.config.limits.min_free_disk_gb)
        context.report_damage(directory, directory.begin(upstream, fresh=fresh))
        context.run.event("stage-started", stage=stage.name, fingerprint=directory.fingerprint)
        started = time.monotonic()
        summary = stage.run(context, directory)
        require_same_inputs(context, stage, directory)
        seconds = round(time.monotonic() - started, 3)
        directory.finish({**summary, "seconds": seconds}, upstream)
        context.run.event("stage-finished", stage=stage.name, seconds=seconds)
        line = f"{duration(seconds):<10} {stage.one_line(summary)}"
    is_check = stage is check.STAGE
    failures = check_failures(directory.summary, context.config) if is_check else []
    mark = "✗" if failures else "[green]✓[/]"
    print_stage(context.console, mark, stage.name, line, "red" if failures else "")
    context.upstream[stage.name] = directory
    if is_check:
        publish_report(context)
        require_passed(directory, context.config)
    return directory


def require_passed(checked: StageDirectory, config: Config) -> None:
    """Raise CheckFailed if the check stage's result breaks a limit of `config`."""
    failures = check_failures(checked.summary, config)
    if failures:
        raise CheckFailed(
            f"The check failed: {'; '.join(failures)}.",
            checked.path,
            "Nothing was pushed. DONE.json lists the sequences that differ. More data or epochs"
            " raise a low rate; if few tree sizes were timed, run with --fresh calibrate.",
        )


def require_same_inputs(context: Context, stage: Stage, directory: StageDirectory) -> None:
    """Raise DataError, and delete the stage's result, if its input changed while it ran.

    The whole result is deleted, because it is unknown which rows were made from the old input. If
    the input cannot be read now, EnvironmentFault is raised instead and nothing is deleted.
    """
    with contextlib.suppress(ConfigError, DataError):  # either means that the input changed
        context.identify_target_again()
        if stage.locate(context).fingerprint == directory.fingerprint:
            return
    directory.begin(stage.contents(context), fresh=True)
    changed = ", ".join(map(str, context.digests.changed()))
    raise DataError(
        f"The input of {stage.name} changed while it ran: {changed or 'other files'}.",
        directory.path,
        "The result is deleted. Run the same command again, and do not change the input.",
    )


def push_run(
    path: Path, *, dry_run: bool = False, console: Console | None = None, **settings: Any
) -> Summary:
    """Run the push stage alone for a finished run; a dry run prints what would be pushed.

    Args:
        path: The run directory.
        settings: Keys of `push` that replace the run's; None and False keep the run's.

    Returns:
        The push stage's summary; of a dry run, the receipt of what would be pushed.

    Raises:
        CheckFailed: The check failed.
        ConfigError: There is no run, one of the stages that push reads is unfinished, no repository
            is named, or the heads' base model is local.
        DataError: The run's stages were not made from one another.
        MedusaDistillError: The upload is refused or fails.
    """
    run, config = RunDirectory.open(path)
    chosen = {key: value for key, value in settings.items() if value}
    config = config.model_copy(update={"push": config.push.model_copy(update=chosen)})
    if not config.push.repo_id:
        raise ConfigError(
            "There is no repository to push to.", "push.repo_id", "Set it to USER/NAME."
        )
    lock = contextlib.nullcontext() if dry_run else run.locked()
    with lock, contextlib.closing(_open_finished_run(run, config, console or Console())) as context:
        if not dry_run:
            return advance(context, push.STAGE).summary
        return push.flat_receipt(push.push(context, dry_run=True))


def _open_finished_run(run: RunDirectory, config: Config, console: Console) -> Context:
    """Return the context to push a finished run, after checking that it may be pushed.

    The configuration comes from the run's check, because run.yaml may have changed since. Only
    `run`, `push` and the check's limits come from `config`. Raises what `push_run` raises.
    """
    stages = run.stages()
    for name in push.STAGE.upstream(config):
        if name not in stages or not stages[name].done:
            raise ConfigError(
                f"This run has no finished {name} stage.",
                run.path,
                f"Run it: medusa-distill run {run.path}",
            )
    checked = stages["check"]
    require_passed(checked, config)
    run.require_one_history()
    resolved = resolve_run(check.configuration(checked, config), [push.STAGE.name])
    return Context(resolved, run, console, "inline", upstream=stages)


def statuses_of(run: RunDirectory, config: Config) -> dict[str, StageStatus]:
    """Determine the status of each stage in a run directory, upstream first.

    Optional stages that the configuration does not ask for, such as `push`, are left out.
    """
    resolved = resolve_run(config, tuple(STAGES))
    return stage_statuses(Context(resolved, run, read_only=True), STAGES)


def wanted_stages(
    config: Config,
    stages: Sequence[str] = tuple(STAGES),
    until: str | None = None,
    fresh: str | None = None,
) -> list[str]:
    """List the stages to run or keep for this configuration, upstream first.

    They are `stages` up to `until` and all stages upstream of these, without those that the
    configuration skips.

    Raises:
        ConfigError: One of `stages` does not exist, `until` is none of `stages`, or `fresh` is none
            of the stages listed.
    """
    found = set()
    for name in stages:
        found.add(name)
        if name == until:
            break
    found -= skipped_stages(config).keys()
    for name in reversed(STAGES):
        if name in found:
            found.update(STAGES[name].upstream(config))
    wanted = [name for name in STAGES if name in found]
    unknown = min(found - STAGES.keys(), default=None)
    for option, stage, known in (
        ("stages", unknown, STAGES),
        ("--until", until, stages),
        ("--fresh", fresh, wanted),
    ):
        if stage is not None and stage not in known:
            raise ConfigError(
                f"This run has no stage '{stage}'.",
                option,
                f"Its stages are {', '.join(known)}.",
            )
    return wanted
