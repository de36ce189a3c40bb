"""Which directory holds a stage's result: the one that the fingerprint of everything it depends on names."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pipeline.config import Config
from pipeline.run.context import Context
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.stage_directory import StageDirectory


def locate(context: Context, stage: ModuleType) -> StageDirectory:
    """The directory that a stage's fingerprint names; nothing is made."""
    return context.run.stage(stage.NAME, fingerprint({"stage": stage.NAME, **identity_of(context, stage)}))


def identity_of(context: Context, stage: ModuleType) -> dict[str, Any]:
    """What a stage's result depends on: its code version, its settings and their inputs, the stages before it."""
    upstream = {name: context.upstream[name].fingerprint for name in upstream_of(stage, context.config)}
    return {"version": stage.VERSION, "settings": stage.identity(context), "upstream": upstream}


def upstream_of(stage: ModuleType, config: Config) -> tuple[str, ...]:
    """The stages that a stage reads."""
    return stage.upstream(config) if hasattr(stage, "upstream") else stage.UPSTREAM
