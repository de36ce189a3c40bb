"""Compare each stage's directory with the configuration, without running anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.artifacts.check_result import check_failures
from pipeline.errors import MedusaDistillError
from pipeline.run.context import Context, Stage, skipped_stages
from pipeline.storage.receipts import Identity, StageTotals, Summary
from pipeline.storage.stage_directory import StageDirectory

FINISHED = {"done", "failed", "skipped"}  # statuses of stages that do not run


@dataclass(frozen=True)
class StageStatus:
    """Status of one stage of a run, with its shard counts.

    Attributes:
        status: `done`; `failed`: finished, but the check's result breaks a limit; `partial`:
            unfinished or damaged; `stale`: made from other settings or input; `not run`; or
            `skipped`.
        why: The reason for the status; may be empty.
        directory: The directory that the status is about, if there is one.
        made: The number of its shards; 0 for a stage without shards.
        expected: The number of shards at the end of a run; None if unknown.
    """

    status: str
    why: str
    directory: StageDirectory | None = None
    made: int = 0
    expected: int | None = 0

    @property
    def finished(self) -> Summary | None:
        """The stage's summary if its status is done, else None."""
        return self.directory.summary if self.status == "done" and self.directory else None

    @property
    def summary(self) -> Summary:
        """The stage's summary; for an unfinished stage, the totals of its shards if it has any."""
        if self.directory is None:
            return {}
        if self.directory.summary or not self.made:
            return self.directory.summary
        return StageTotals(self.directory.receipts().values()).summary()


def stage_statuses(context: Context, stages: Mapping[str, Stage]) -> dict[str, StageStatus]:
    """Determine the status of every stage of a read-only context's run, upstream first.

    If a stage's fingerprint cannot be computed, because the target or the seeds cannot be read now,
    this stage and all later ones get the status of the directories that the run links to. Stages
    that are skipped without a reason are left out.
    """
    statuses = {}
    obstacle = None
    skipped = skipped_stages(context.config)
    for name, stage in stages.items():
        if name in skipped:
            if skipped[name]:
                statuses[name] = StageStatus("skipped", skipped[name])
            continue
        if obstacle is None:
            try:
                context.upstream[name] = stage.locate(context)
            except MedusaDistillError as error:
                obstacle = error
        if obstacle is not None:
            statuses[name] = _as_linked(context.run.latest(name), obstacle)
            continue
        statuses[name] = _stage_status(context, stage, statuses)
    checked = statuses.get("check")
    if checked is not None and checked.finished:
        failures = check_failures(checked.finished, context.config)
        if failures:
            statuses["check"] = replace(checked, status="failed", why="; ".join(failures))
    return statuses


def _as_linked(linked: StageDirectory | None, obstacle: MedusaDistillError) -> StageStatus:
    """Return the status of a stage with unknown fingerprint, from the directory linked by the run.

    Args:
        obstacle: The error that prevents computing the fingerprint.
    """
    if linked is None:
        return StageStatus("not run", obstacle.what, expected=None)
    why, made = f"assumed unchanged: {obstacle.what}", len(linked.shards())
    if linked.done is None:
        return StageStatus("partial", why, linked, made, None)
    return StageStatus("done", why, linked, made, made)


def _stage_status(context: Context, stage: Stage, before: dict[str, StageStatus]) -> StageStatus:
    """Determine one stage's status: compare its directory with the configuration and upstream."""
    directory, sources = context.upstream[stage.name], stage.upstream(context.config)
    resized_files = directory.resized_files()
    if directory.is_current(stage.contents(context)) and not resized_files:
        made = len(directory.shards())
        return StageStatus("done", "", directory, made, made)
    expected: int | None = 0
    if stage.sharded:  # as many as the first upstream stage has; unknown for seeds
        expected = before[sources[0]].expected if sources else None
    if not directory.path.exists():
        linked = context.run.latest(stage.name)
        if linked is None:
            return StageStatus("not run", "never run", expected=expected)
        why = _why_stale(linked.identity, stage.identity_of(context))
        return StageStatus("stale", why, linked, 0, expected)
    made = len(directory.receipts())
    status, why = "stale", "its upstream stages have changed or are unfinished"
    if directory.done is None:
        status, why = "partial", "unfinished"
    elif resized_files:
        status, why = "partial", "damaged files"
    return StageStatus(status, why, directory, made, expected)


def _why_stale(before: Identity, now: Identity) -> str:
    """Return why a stage is stale: the changed settings, or else a change of input or code."""
    old, new = before.get("settings", {}), now["settings"]
    if "settings" in new:  # the settings lie beside the target's hashes
        old, new = old.get("settings", {}), new["settings"]
    changed = sorted(key for key in new if new[key] != old.get(key))
    if changed:
        return f"changed: {', '.join(changed)}"
    if before.get("upstream") != now["upstream"]:
        return "an upstream stage changed"
    return "the target, the seed or the stage's code changed"
