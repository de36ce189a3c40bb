"""push: the export on the Hub, as one commit, and never when the check failed."""

from __future__ import annotations

from typing import Any

from pipeline.checkpoints.hub import push_export
from pipeline.execution.context import Context
from pipeline.storage.durable import read_json, write_json
from pipeline.storage.stage_directory import StageDirectory

NAME = "push"
VERSION = 1
UPSTREAM = ("export", "check")


def identity(context: Context) -> dict[str, Any]:
    return context.config.push.model_dump(mode="json")


def run(context: Context, stage: StageDirectory) -> dict[str, Any]:
    """Push, and keep the receipt."""
    settings = context.config.push
    assert settings.repo_id, "push runs only with a repo_id"
    receipt = push_export(
        context.upstream["export"].path,
        repo_id=settings.repo_id,
        private=settings.private,
        base_model=settings.base_model,
        report=read_json(context.run.path / "report.json"),
        recipe=context.config.model_dump(mode="json"),
    )
    write_json(stage.path / "receipt.json", receipt)
    return {"repo": receipt["repo"], "commit": receipt["commit"], "files": len(receipt["files"]), "unchanged": receipt.get("unchanged", False)}


def one_line(summary: dict[str, Any]) -> str:
    return f"{summary['repo']} has it already" if summary["unchanged"] else f"{summary['files']} files to {summary['repo']}, commit {str(summary['commit'])[:8]}"
