"""push: the export on the Hub, as one commit, and never when the check failed.

With `push.dataset` the conversations go first, to a data set. With Medusa-2 the tuned backbone goes to `push.repo_id`,
and its heads to the same name with `-speculator.METHOD` behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config import Config
from pipeline.export.card_metadata import Licence, licence_of
from pipeline.export.hub import Repositories, prepare_backbone, prepare_export, repositories
from pipeline.export.hub_data_set import GeneratedShards, push_data_set
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.export.parcel import Parcel, Push
from pipeline.heads.shape import head_kind
from pipeline.report.formatting import visible
from pipeline.run.context import Context
from pipeline.run.reporting import assemble
from pipeline.run.stage import Stage
from pipeline.storage.atomic import write_json
from pipeline.storage.done import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.files import is_local
from pipeline.training.methods import method_of

NAME = "push"
VERSION = 3
BESIDE = ("data_set", "backbone")  # in a receipt, what went besides the heads


def upstream(config: Config) -> tuple[str, ...]:
    """The export and its check; the conversations where they are published."""
    return ("export", "check", *(["generate"] if config.push.dataset else []))


def identity(context: Context) -> Identity:
    return context.config.push.model_dump(mode="json")


def run(context: Context, stage: StageDirectory) -> Summary:
    receipt = push(context, work_in=stage.path)
    write_json(stage.path / "receipt.json", receipt)
    beside = {name: _summary(receipt[name]) for name in BESIDE if name in receipt}
    return (_summary(receipt) if "repo" in receipt else {}) | beside


def _summary(receipt: dict[str, Any]) -> dict[str, Any]:
    return {
        "repo": receipt["repo"],
        "commit": receipt["commit"],
        "files": len(receipt["files"]),
        "unchanged": receipt["unchanged"],
    }


def push(context: Context, *, dry_run: bool = False, work_in: Path | None = None) -> dict[str, Any]:
    """Send what is asked for with fresh cards, made of the stages' records and not of report.json or of the Hub as they
    are now; a dry run touches no network and returns what would go.

    Returns:
        The heads' receipt, with the data set's under `data_set` and a tuned backbone's under `backbone`.
    """
    settings, target = context.config.push, context.config.target.model
    kind = head_kind(context.config.train.heads)
    to = repositories(settings, kind, target, tuned=method_of(context.config.train).tunes_backbone)
    original = settings.base_model or (None if is_local(target) else target)
    report, _ = assemble(context.run, context.config)
    plan = Push(
        "",
        report=report,
        recipe=context.config.model_dump(mode="json"),
        base_model=original,
        private=settings.private,
        dry_run=dry_run,
        licence=_licence(context.config, report.get("target_revision"), online=not dry_run),
        data_set=to.data_set,
    )
    models = _models(context, plan, to) if to.heads else {}  # nothing is sent where one of them is refused
    receipt: dict[str, Any] = {}
    if to.data_set:
        generate = context.upstream["generate"]
        generated = GeneratedShards(generate.shards(), generate.fingerprint)
        receipt["data_set"] = push_data_set(generated, replace(plan, repo_id=to.data_set), kind, work_in)
    sent = {name: parcel.send() for name, parcel in models.items()}
    return receipt | sent.pop("heads", {}) | sent


def _models(context: Context, plan: Push, to: Repositories) -> dict[str, Parcel]:
    """What goes, in this order: a tuned backbone, where there is one, and the heads; each compared with its record."""
    exported = context.upstream["export"]
    export, done = exported.path, exported.done
    assert to.heads and done, "there is nothing to push, or nowhere to push it to"
    checked = {name: done.files[name].sha256 for name in done.summary["files"] if name in done.files}
    heads = replace(plan, repo_id=to.heads, base_model=to.backbone or context.config.push.base_model)
    if to.backbone is None:
        return {"heads": prepare_export(export, heads, checked)}
    tuned = {name: facts.sha256 for name, facts in exported.files_below(BACKBONE_DIRECTORY).items()}
    backbone, kind = replace(plan, repo_id=to.backbone), head_kind(context.config.train.heads)
    prepared = prepare_backbone(export / BACKBONE_DIRECTORY, backbone, tuned, heads_repo_id=to.heads, kind=kind)
    return {"backbone": prepared, "heads": prepare_export(export, heads, checked)}


def _licence(config: Config, revision: str | None, *, online: bool) -> Licence | None:
    """What the cards declare: `push.license`, or what the target's own card states."""
    if chosen := config.push.license:
        return Licence(chosen)
    return licence_of(config.target.model, revision, online=online)


def print_dry_run(console: Console, receipt: dict[str, Any]) -> None:
    for name in BESIDE:
        if name in receipt:
            print_dry_run(console, receipt[name])
    if "repo" not in receipt:
        return
    console.print(
        f"Would push to {receipt['repo']} ({'private' if receipt['private'] else 'public'}), as one commit:",
        highlight=False,
    )
    for file in receipt["files"]:
        console.print(f"  {file['size']:>14,} bytes  {visible(file['path'])}", highlight=False, markup=False)
    for missing in receipt["missing"]:
        console.print(f"[yellow]Still missing:[/] {missing}", highlight=False, soft_wrap=True)


def one_line(summary: Summary) -> str:
    return "; ".join(
        f"{part['repo']} has it already"
        if part["unchanged"]
        else f"{part['files']} files to {part['repo']}, commit {str(part['commit'])[:8]}"
        for part in _parts(summary)
    )


def _parts(summary: Summary) -> Iterator[dict[str, Any]]:
    yield from (summary[name] for name in BESIDE if name in summary)
    if "repo" in summary:
        yield summary


STAGE = Stage(NAME, VERSION, upstream, identity, run, one_line, asked_for=lambda config: config.push.asks_for_something)
