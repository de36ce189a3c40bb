"""Where a run stands: each stage's state against its configuration, without running anything."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from pipeline.config import Config
from pipeline.errors import MedusaDistillError
from pipeline.execution.context import Context
from pipeline.flow import STAGES, identity_of, locate
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory


@dataclass(frozen=True)
class StageState:
    """One stage: `word` is done, partial, stale (other settings or inputs were used last time) or not run."""

    word: str
    why: str
    directory: StageDirectory | None = None
    shards: str = ""


def stage_states(run: RunDirectory, config: Config) -> dict[str, StageState]:
    """Every stage's state, upstream first. A target or seeds that are not there leave what the links say."""
    context = Context(config, run, Console(quiet=True), read_only=True)
    states: dict[str, StageState] = {}
    obstacle: MedusaDistillError | None = None
    for name, stage in STAGES.items():
        wanted: StageDirectory | None = None
        try:
            wanted = locate(context, stage) if obstacle is None else None
        except MedusaDistillError as error:
            obstacle = error
        if wanted is None:
            states[name] = _as_linked(run.latest(name), obstacle)
            continue
        states[name] = _state(context, run.latest(name), wanted, stage)
        context.upstream[name] = wanted
    return states


def _as_linked(linked: StageDirectory | None, obstacle: MedusaDistillError | None) -> StageState:
    why = obstacle.what if obstacle else ""
    if linked is None:
        return StageState("not run", why)
    why = f"taken to be unchanged: {why}" if why else ""
    return StageState("done" if linked.done else "partial", why, linked, _count(linked))


def _state(context: Context, linked: StageDirectory | None, wanted: StageDirectory, stage: Any) -> StageState:
    upstream = {name: context.upstream[name].content for name in stage.UPSTREAM}
    if wanted.is_current(upstream) and wanted.fits:
        return StageState("done", "", wanted, _count(wanted, context, stage))
    if wanted.path.exists():
        why = "unfinished" if wanted.done is None else "what it was made from has changed, or a file is missing"
        return StageState("partial" if wanted.done is None else "stale", why, wanted, _count(wanted, context, stage))
    if linked is not None:
        return StageState("stale", _difference(linked.identity, identity_of(context, stage)), linked, _count(linked))
    return StageState("not run", "never run")


def _count(directory: StageDirectory, context: Context | None = None, stage: Any = None) -> str:
    """Committed of expected shards, for stages that have shards."""
    committed = len(directory.shards())
    source = context.upstream.get(stage.UPSTREAM[0]) if context and stage and stage.UPSTREAM else None
    expected = len(source.shards()) if source and committed else committed
    return f"{committed}/{expected}" if committed else ""


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Which settings made a stage stale, by name."""
    changed = sorted(_changed_keys(before.get("settings"), json.loads(json.dumps(now["settings"]))))
    changed = [key.removeprefix("settings.") for key in changed]
    if changed:
        return "changed: " + ", ".join(changed[:4])
    return "what comes before it changed" if before.get("upstream") != now["upstream"] else "the stage's code changed"


def _changed_keys(before: Any, now: Any, prefix: str = "") -> set[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = before.keys() | now.keys()
        return set().union(
            *(_changed_keys(before.get(key), now.get(key), f"{prefix}.{key}".strip(".")) for key in keys)
        )
    return set() if before == now else {prefix}
