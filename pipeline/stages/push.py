"""push: the export on the Hub, as one commit, and never when the check failed.

With Medusa-2 the tuned backbone goes first, to `push.repo_id`, and its heads to the same name with `-medusa` behind it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.console import Console

from pipeline.export.hub import Push, push_backbone, push_export, repositories
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.heads.shape import head_kind
from pipeline.report.formatting import visible
from pipeline.run.context import Context
from pipeline.run.stage import Stage, reads
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.done import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.files import is_local
from pipeline.training.methods import method_of

NAME = "push"
VERSION = 1


def identity(context: Context) -> Identity:
    return context.config.push.model_dump(mode="json")


def run(context: Context, stage: StageDirectory) -> Summary:
    receipt = push(context)
    write_json(stage.path / "receipt.json", receipt)
    summary = _summary(receipt)
    return summary | ({"backbone": _summary(receipt["backbone"])} if "backbone" in receipt else {})


def _summary(receipt: dict[str, Any]) -> dict[str, Any]:
    return {
        "repo": receipt["repo"],
        "commit": receipt["commit"],
        "files": len(receipt["files"]),
        "unchanged": receipt["unchanged"],
    }


def push(context: Context, *, dry_run: bool = False) -> dict[str, Any]:
    """Send the export with a fresh card; a dry run touches no network and returns what would go.

    With Medusa-2 the receipt has the tuned backbone's under `backbone`.
    """
    settings, exported = context.config.push, context.upstream["export"]
    export, done = exported.path, exported.done
    train = context.config.train
    heads_id, backbone_id = repositories(settings.repo_id, train.heads, tuned=method_of(train).tunes_backbone)
    assert heads_id and done, "there is nothing to push, or nowhere to push it to"
    checked = {name: done.files[name].sha256 for name in done.summary["files"] if name in done.files}
    heads = Push(
        heads_id,
        report=read_json(context.run.path / "report.json"),
        recipe=context.config.model_dump(mode="json"),
        base_model=backbone_id or settings.base_model,
        private=settings.private,
        dry_run=dry_run,
    )
    if backbone_id is None:
        return push_export(export, heads, checked)
    model = context.config.target.model
    original = settings.base_model or (None if is_local(model) else model)
    backbone = replace(heads, repo_id=backbone_id, base_model=original)
    tuned = {name: facts.sha256 for name, facts in exported.files_below(BACKBONE_DIRECTORY).items()}
    kind = head_kind(train.heads)
    pushed = push_backbone(export / BACKBONE_DIRECTORY, backbone, tuned, heads_repo_id=heads_id, kind=kind)
    return push_export(export, heads, checked) | {"backbone": pushed}


def print_dry_run(console: Console, receipt: dict[str, Any]) -> None:
    if "backbone" in receipt:
        print_dry_run(console, receipt["backbone"])
    console.print(
        f"Would push to {receipt['repo']} ({'private' if receipt['private'] else 'public'}), as one commit:",
        highlight=False,
    )
    for file in receipt["files"]:
        console.print(f"  {file['size']:>14,} bytes  {visible(file['path'])}", highlight=False, markup=False)
    for missing in receipt["missing"]:
        console.print(f"[yellow]Still missing:[/] {missing}", highlight=False, soft_wrap=True)


def one_line(summary: Summary) -> str:
    parts = [summary["backbone"]] if "backbone" in summary else []
    return "; ".join(
        f"{part['repo']} has it already"
        if part["unchanged"]
        else f"{part['files']} files to {part['repo']}, commit {str(part['commit'])[:8]}"
        for part in [*parts, summary]
    )


STAGE = Stage(
    NAME, VERSION, reads("export", "check"), identity, run, one_line, asked_for=lambda config: bool(config.push.repo_id)
)
