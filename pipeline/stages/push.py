"""push: publish a checked export on the Hub, as one commit per repository.

With Medusa-2 the tuned backbone goes to `push.repo_id`, and the heads to a repository of the same
name with the suffix `-speculator.METHOD`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pipeline.export.card import Licence, Published, licence_of
from pipeline.export.hub import Receipt, backbone_upload, heads_upload, print_dry_run, send_all
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.run.context import Context, Stage, reads
from pipeline.run.reporting import assemble_report
from pipeline.storage.atomic import write_json
from pipeline.storage.receipts import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.files import is_local

NAME = "push"
VERSION = 3
HEADS = "heads"


def identity(context: Context) -> Identity:
    """Return what the push stage's result depends on: its settings."""
    return context.config.push.model_dump(mode="json")


def run(context: Context, stage: StageDirectory) -> Summary:
    """Push to the Hub, write receipt.json, and return its content as the summary."""
    receipt = flat_receipt(push(context))
    write_json(stage.path / "receipt.json", receipt)
    return receipt


def push(context: Context, *, dry_run: bool = False) -> dict[str, Receipt]:
    """Upload the heads and a tuned backbone to the Hub, each with a card.

    The cards state the figures in the stages' summaries.

    Args:
        dry_run: Prepare and print the uploads, and return their receipts, without the network.

    Returns:
        The receipts of the uploads by name: `backbone`, `heads`.

    Raises:
        ConfigError: The heads' base model is local. A dry run prints the uploads before.
        MedusaDistillError: An upload is refused or fails.
    """
    config, settings = context.config, context.config.push
    target, tuned = config.target.model, context.resolved.method.tunes_backbone
    to = context.resolved.repositories
    report = assemble_report(context.run, config)
    if settings.license:
        licence: Licence | None = Licence(settings.license)
    else:
        licence = licence_of(target, report.target_revision, online=not dry_run)
    original = settings.base_model
    if original is None and not is_local(target):
        original = target
    published = Published(
        report,
        config,
        base_model=original,
        tuned=tuned,
        licence=licence,
        heads_repo_id=to.heads,
    )
    exported, uploads = context.upstream["export"], {}
    if to.backbone:
        card = replace(published, repo_id=to.backbone)
        path = exported.path / BACKBONE_DIRECTORY
        checked = exported.files_below(BACKBONE_DIRECTORY)
        uploads["backbone"] = backbone_upload(path, card, checked)
    base = to.backbone or settings.base_model
    card = replace(published, repo_id=to.heads, base_model=base)
    assert exported.done, "only a finished export is pushed"
    checked = dict(exported.done.files)
    for name in exported.files_below(BACKBONE_DIRECTORY):
        del checked[f"{BACKBONE_DIRECTORY}/{name}"]
    uploads[HEADS] = heads_upload(exported.path, card, checked)
    if dry_run:
        receipts = {name: each.dry_run(settings.private) for name, each in uploads.items()}
        print_dry_run(context.console, receipts)
        for upload in uploads.values():
            upload.require_base_model()
        return receipts
    return send_all(uploads, private=settings.private)


def flat_receipt(receipts: Mapping[str, Receipt]) -> Receipt:
    """Return the heads' receipt with the other receipts added under their names."""
    others = {name: part for name, part in receipts.items() if name != HEADS}
    return {**receipts[HEADS], **others}


FIGURES = {"repo": "repo", "commit": "commit"}
STAGE = Stage(NAME, VERSION, reads("export", "check"), identity, run, FIGURES)
