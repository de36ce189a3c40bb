"""The status of each stage of a run against its configuration, without running anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from pipeline.artifacts.check_result import CheckResult, Limits
from pipeline.artifacts.json_form import from_json
from pipeline.errors import MedusaDistillError
from pipeline.run.context import Context, Stage
from pipeline.run.resolved import ResolvedRun
from pipeline.storage.done import Identity, Summary
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from pipeline.storage.totals import StageTotals


@dataclass(frozen=True)
class StageStatus:
    """One stage: `status` is done, failed, partial (some must be made), stale (made from something
    else), not run or skipped; failed is a finished one whose result may not be used, such as a
    check that found too low a rate.

    `made` counts the shards that a run would keep, `expected` all that it would have at its end;
    both are 0 for a stage without shards, and `expected` is None while nobody can know it.
    """

    status: str
    why: str
    directory: StageDirectory | None = None
    made: int = 0
    expected: int | None = 0

    @property
    def finished(self) -> Summary | None:
        """What it says of itself where it is done."""
        return self.directory.summary if self.status == "done" and self.directory else None

    @property
    def summary(self) -> Summary:
        """What a finished stage says of itself, and of an unfinished one the sums over its
        shards.
        """
        if self.directory is None:
            return {}
        return self.directory.summary or (
            StageTotals(self.directory.receipts().values()).summary() if self.made else {}
        )


def stage_statuses(
    run: RunDirectory, resolved: ResolvedRun, stages: Mapping[str, Stage]
) -> dict[str, StageStatus]:
    """Every stage's status, upstream first; without the target or the seeds it is what the links
    say.
    """
    config = resolved.config
    context = Context(resolved, run, Console(quiet=True), read_only=True)
    statuses: dict[str, StageStatus] = {}
    obstacle: MedusaDistillError | None = None
    for name, stage in stages.items():
        if (why := stage.skipped(config)) is not None:
            statuses |= {name: StageStatus("skipped", why)} if why else {}
            continue
        wanted: StageDirectory | None = None
        try:
            wanted = stage.locate(context) if obstacle is None else None
        except MedusaDistillError as error:
            obstacle = error
        if wanted is None:
            found = _as_linked(run.latest(name), obstacle)
        else:
            found = _status(context, run.latest(name), wanted, stage, statuses)
            context.upstream[name] = wanted
        if name == "check" and found.status == "done":
            failures = from_json(CheckResult, found.summary).failures(Limits.of(config))
            if failures:
                found = replace(found, status="failed", why="; ".join(failures))
        statuses[name] = found
    return statuses


def _as_linked(linked: StageDirectory | None, obstacle: MedusaDistillError | None) -> StageStatus:
    why = obstacle.what if obstacle else ""
    if linked is None:
        return StageStatus("not run", why, expected=None)
    why = f"taken to be unchanged: {why}" if why else ""
    made = len(linked.shards())
    return StageStatus(
        "done" if linked.done else "partial", why, linked, made, made if linked.done else None
    )


def _status(
    context: Context,
    linked: StageDirectory | None,
    wanted: StageDirectory,
    stage: Stage,
    before: dict[str, StageStatus],
) -> StageStatus:
    sources = stage.upstream(context.config)
    misfits = wanted.misfits()
    if wanted.is_current(stage.contents(context)) and not misfits:
        made = len(wanted.done.shards) if wanted.done else 0
        return StageStatus("done", "", wanted, made, made)
    made = _made(context, wanted, sources)
    expected: int | None = 0
    if (
        stage.files.sharded
    ):  # one for each of the stage before; how many seeds there are, only reading them tells
        expected = before[sources[0]].expected if sources else None
    if not wanted.path.exists():
        if linked is None:
            return StageStatus("not run", "never run", expected=expected)
        return StageStatus(
            "stale", _difference(linked.identity, stage.identity_of(context)), linked, 0, expected
        )
    unready = [name for name in sources if before[name].status not in ("done", "failed")]
    status, why = "stale", "what it was made from has changed"
    if wanted.done is None:
        status, why = "partial", "unfinished"
    elif misfits:
        files = [str(path.relative_to(wanted.path)) for path in misfits]
        more = f" and {len(files) - 2} more" if len(files) > 2 else ""
        status, why = "partial", f"damaged: {', '.join(files[:2])}{more}"
    elif unready:
        why = f"{unready[0]} comes first; kept if that comes out the same"
    return StageStatus(status, why, wanted, made, expected)


def _made(context: Context, wanted: StageDirectory, sources: Sequence[str]) -> int:
    """The shards that are whole and, where there is something to compare with, made from what is
    there now.
    """
    have = wanted.receipts()
    source = context.upstream[sources[0]].done if sources else None
    if not source or not source.shards:
        return len(have)
    content = {receipt.index: receipt.content_sha256 for receipt in source.shards}
    return sum(receipt.upstream == content.get(index) for index, receipt in have.items())


def _difference(before: Identity, now: Identity) -> str:
    """Which settings made a stage stale, by name."""
    changed = sorted(_changed_keys(before.get("settings"), json.loads(json.dumps(now["settings"]))))
    changed = [key.removeprefix("settings.") for key in changed]
    if changed:
        return "changed: " + ", ".join(changed[:4])
    return (
        "what comes before it changed"
        if before.get("upstream") != now["upstream"]
        else "the stage's code changed"
    )


def _changed_keys(before: Any, now: Any, prefix: str = "") -> set[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = before.keys() | now.keys()
        return set().union(
            *(
                _changed_keys(before.get(key), now.get(key), f"{prefix}.{key}".strip("."))
                for key in keys
            )
        )
    return set() if before == now else {prefix}
