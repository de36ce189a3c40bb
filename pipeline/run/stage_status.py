"""The status of each stage of a run against its configuration, without running anything."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from pipeline.artifacts.check_result import CheckResult, Limits
from pipeline.artifacts.json_form import from_json
from pipeline.errors import DataError, MedusaDistillError
from pipeline.run.context import Context, Stage
from pipeline.run.resolved import ResolvedRun
from pipeline.storage.receipts import Identity, StageTotals, Summary
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory

MOST_NAMES = 4  # of changed settings
CACHES = ("features", "tuned-features")  # stages whose results may be deleted


@dataclass(frozen=True)
class StageStatus:
    """One stage's status.

    `status` is done, failed (finished, but its result may not be used), partial (some must be
    made), stale (made from something else), not run or skipped. `made` counts the shards that a run
    would keep, `expected` those that it would have at its end; both are 0 for a stage without
    shards, and `expected` is None while it is unknown.
    """

    status: str
    why: str
    directory: StageDirectory | None = None
    made: int = 0
    expected: int | None = 0

    @property
    def finished(self) -> Summary | None:
        """The summary of a stage that is done."""
        return self.directory.summary if self.status == "done" and self.directory else None

    @property
    def summary(self) -> Summary:
        """A finished stage's summary, and the sums over an unfinished one's shards."""
        if self.directory is None:
            return {}
        if self.directory.summary or not self.made:
            return self.directory.summary
        return StageTotals(self.directory.receipts().values()).summary()


def stage_statuses(
    run: RunDirectory, resolved: ResolvedRun, stages: Mapping[str, Stage]
) -> dict[str, StageStatus]:
    """Every stage's status, upstream first.

    Without the target or the seeds, stages are taken to be what the run links to.
    """
    context = Context(resolved, run, Console(quiet=True), read_only=True)
    statuses: dict[str, StageStatus] = {}
    obstacle: MedusaDistillError | None = None
    for name, stage in stages.items():
        why = stage.skipped(resolved.config)
        if why is not None:
            if why:
                statuses[name] = StageStatus("skipped", why)
            continue
        linked = run.latest(name)
        try:
            if obstacle is not None:
                raise obstacle
            wanted = stage.locate(context)
        except MedusaDistillError as error:
            obstacle = error
            found = _as_linked(linked, obstacle)
        else:
            found = _status(context, linked, wanted, stage, statuses)
            context.upstream[name] = wanted
        if name == "check" and found.status == "done":
            limits = Limits.of(resolved.config)
            failures = from_json(CheckResult, found.summary).failures(limits)
            if failures:
                found = replace(found, status="failed", why="; ".join(failures))
        statuses[name] = found
    return statuses


def _as_linked(linked: StageDirectory | None, obstacle: MedusaDistillError) -> StageStatus:
    if linked is None:
        return StageStatus("not run", obstacle.what, expected=None)
    why, made = f"taken to be unchanged: {obstacle.what}", len(linked.shards())
    if linked.done:
        return StageStatus("done", why, linked, made, made)
    return StageStatus("partial", why, linked, made, None)


def _status(
    context: Context,
    linked: StageDirectory | None,
    wanted: StageDirectory,
    stage: Stage,
    before: dict[str, StageStatus],
) -> StageStatus:
    sources, done, misfits = stage.upstream(context.config), wanted.done, wanted.misfits()
    if done and wanted.is_current(stage.contents(context)) and not misfits:
        return StageStatus("done", "", wanted, len(done.shards), len(done.shards))
    expected: int | None = 0
    if stage.files.sharded:  # as many as the stage before has; those of seeds are unknown
        expected = before[sources[0]].expected if sources else None
    if not wanted.path.exists():
        if linked is None:
            return StageStatus("not run", "never run", expected=expected)
        why = _difference(linked.identity, stage.identity_of(context))
        return StageStatus("stale", why, linked, 0, expected)
    unready = [name for name in sources if before[name].status not in ("done", "failed")]
    status, why = "stale", "what it was made from has changed"
    if done is None:
        status, why = "partial", "unfinished"
    elif misfits:
        names = [str(path.relative_to(wanted.path)) for path in misfits]
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        status, why = "partial", f"damaged: {', '.join(names[:2])}{more}"
    elif unready:
        why = f"{unready[0]} comes first; kept if that comes out the same"
    return StageStatus(status, why, wanted, _num_kept(context, wanted, sources), expected)


def _num_kept(context: Context, wanted: StageDirectory, sources: Sequence[str]) -> int:
    """The whole shards that were made from the shards that the stage before has now."""
    have = wanted.receipts()
    source = context.upstream[sources[0]].done if sources else None
    if not source or not source.shards:
        return len(have)
    content = {receipt.index: receipt.content_sha256 for receipt in source.shards}
    return sum(receipt.upstream == content.get(index) for index, receipt in have.items())


def _difference(before: Identity, now: Identity) -> str:
    """Name the settings that made a stage stale, or else its input or its code."""
    old = dict(_flat(before.get("settings", {})))
    new = dict(_flat(json.loads(json.dumps(now["settings"]))))
    missing = object()
    changed = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key, missing) != new.get(key, missing):
            changed.append(key.removeprefix("settings."))
    if changed:
        return "changed: " + ", ".join(changed[:MOST_NAMES])
    if before.get("upstream") != now["upstream"]:
        return "what comes before it changed"
    return "the stage's code changed"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested settings with its dotted key."""
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def require_one_history(run: RunDirectory) -> None:
    """Refuse stages that were not made from one another: a card would mix two trainings' figures.

    They are not after `run --until train` with another setting. A cache may be deleted.

    Raises:
        DataError: Names the stage that is unfinished, missing, or another one.
    """
    fix = "Run the same configuration again, and then push."
    stages = run.stages()
    stages.pop("push", None)
    for name, stage in stages.items():
        if stage.done is None:
            raise DataError(f"The stage {name} is not finished.", str(stage.path), fix)
        for source, content in stage.done.upstream.items():
            link = str(run.path / "latest" / source)
            if source not in stages:
                if source not in CACHES:
                    raise DataError(f"The stage {source} is missing.", link, fix)
            elif stages[source].content != content:
                what = f"The stage {source} is not the one that {name} was made from."
                raise DataError(what, link, fix)
