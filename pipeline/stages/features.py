"""features: one forward of the backbone over every generated row, its last hidden states cached in Parquet.

Promises: one state per target-written token, exactly what the target's lm_head read when it predicted that token;
rows keep their order and ids. `feature_worker.py` does it.
"""

from __future__ import annotations

from typing import Any

from pipeline.run.context import Context
from pipeline.run.sharded import run_sharded
from pipeline.storage.stage_directory import StageDirectory
from pipeline.training.feature_worker import Worker, engine_identity

NAME = "features"
VERSION = 1
UPSTREAM = ("generate",)


def identity(context: Context) -> dict[str, Any]:
    """The engine, the codec and the target."""
    return {**engine_identity(context.config.features), "target": context.target_identity}


def run(context: Context, stage: StageDirectory) -> dict[str, Any]:
    """Cache every pending shard's states."""
    placement = context.placement(NAME)
    arguments = {"target": context.target, "settings": context.config.features, "gpus": placement.gpus}
    summary = run_sharded(context, stage, context.upstream["generate"], Worker, arguments, placement, unit="positions")
    size = sum(path.stat().st_size for path in stage.shards())
    return summary | {"bytes": size, "bytes_per_position": round(size / max(1, summary.get("positions", 0)), 2)}


def one_line(summary: dict[str, Any]) -> str:
    speed = f", {summary['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in summary else ""
    positions = f"{summary.get('positions', 0):,.0f} positions of {summary['bytes_per_position']:,.0f} bytes"
    return f"{positions}{speed}, {summary['quarantined']} quarantined"
