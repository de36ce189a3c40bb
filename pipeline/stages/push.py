"""push: the export on the Hub, as one commit, and never when the check failed."""

from __future__ import annotations

from typing import Any

from rich.console import Console

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
    receipt = push(context)
    write_json(stage.path / "receipt.json", receipt)
    return {
        "repo": receipt["repo"],
        "commit": receipt["commit"],
        "files": len(receipt["files"]),
        "unchanged": receipt["unchanged"],
    }


def push(context: Context, *, dry_run: bool = False) -> dict[str, Any]:
    """Send the export with a fresh card; a dry run touches no network and returns what would go."""
    settings = context.config.push
    assert settings.repo_id, "there is nothing to push to"
    return push_export(
        context.upstream["export"].path,
        repo_id=settings.repo_id,
        private=settings.private,
        base_model=settings.base_model,
        report=read_json(context.run.path / "report.json"),
        recipe=context.config.model_dump(mode="json"),
        dry_run=dry_run,
    )


def print_dry_run(console: Console, receipt: dict[str, Any]) -> None:
    """What would go, as a person reads it."""
    console.print(
        f"Would push to {receipt['repo']} ({'private' if receipt['private'] else 'public'}), as one commit:",
        highlight=False,
    )
    for file in receipt["files"]:
        console.print(f"  {file['size']:>14,} bytes  {file['path']}", highlight=False)
    for missing in receipt["missing"]:
        console.print(f"[yellow]Still missing:[/] {missing}", highlight=False, soft_wrap=True)


def one_line(summary: dict[str, Any]) -> str:
    return (
        f"{summary['repo']} has it already"
        if summary["unchanged"]
        else f"{summary['files']} files to {summary['repo']}, commit {str(summary['commit'])[:8]}"
    )
