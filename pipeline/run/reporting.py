"""Assemble a run's report from the summaries of its stages, and write it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from pipeline.artifacts.check_result import CheckResult, Limits
from pipeline.artifacts.json_form import from_json
from pipeline.config import Config
from pipeline.execution.machine import hardware, versions
from pipeline.export.card import Licence, Published, model_card
from pipeline.heads.kinds import head_kind
from pipeline.report.documents import print_report, report_texts
from pipeline.report.report import Report, RunFacts
from pipeline.run.context import Context
from pipeline.storage.atomic import write_text
from pipeline.storage.run_directory import RunDirectory
from pipeline.training.methods import method_of

FIGURES = ("seeds", "generate", "features", "train", "export")  # parts of Report: stage summaries


def publish_report(context: Context) -> None:
    """Write the run's report files and the model card of its export, and print the report."""
    config = context.config
    report = assemble_report(context.run, config)
    samples = []
    check = context.run.latest("check")
    if config.report.show_text and check and check.done:
        samples = from_json(CheckResult, check.summary).samples
    for name, text in report_texts(report, samples).items():
        write_text(context.run.path / name, text)
    to = context.resolved.repositories
    tuned = context.resolved.method.tunes_backbone
    published = Published(
        report,
        config,
        repo_id=to.heads,
        base_model=to.backbone if tuned else config.target.model,
        tuned=tuned,
        licence=Licence(config.push.license) if config.push.license else None,
    )
    write_text(context.upstream["export"].path / "README.md", model_card(published))
    print_report(report, context.console, context.run.path)


def assemble_report(run: RunDirectory, config: Config, without: Collection[str] = ()) -> Report:
    """Return the report of a run's finished stages, except those in `without`.

    Hardware, versions and the commit of a Hub target are taken from the check. Without a check,
    hardware and versions describe this machine, and the commit is None.
    """
    figures = {}
    seconds = {}
    quarantine = {}
    fingerprints = {}
    check = CheckResult()
    check_figures = None
    for name, stage in run.stages().items():
        if stage.done is None or name in without:
            continue
        summary = stage.summary
        fingerprints[name] = stage.fingerprint[:8]
        seconds[name] = summary["seconds"]
        if summary.get("reasons"):
            quarantine[name] = summary["reasons"]
        if name in FIGURES:
            figures[name] = summary
        elif name == "calibrate":
            figures.update(heads=summary["heads"], tree=summary["tree"])
        elif name == "check":
            check = from_json(CheckResult, summary)
            check_figures = check.figures(Limits.of(config))
    settings = config.train
    method = method_of(settings)
    report = from_json(Report, figures)
    train = report.train
    if train is not None:
        train = replace(train, recipe=method.recipe_name(settings))
        if check.drift is not None and check.drift.positions:
            # Training has measured the adapter, the check the published weights.
            train = replace(train, drift=check.drift)
    kind = head_kind(settings.heads)
    return replace(
        report,
        run=RunFacts(
            name=config.run.name, date=time.strftime("%Y-%m-%d"), fingerprints=fingerprints
        ),
        target=config.target.model,
        target_revision=check.target_revision,
        method=settings.method,
        num_heads=settings.num_heads,
        drafter=f"{kind.title}, {method.effect}, {settings.num_heads} {kind.units}",
        train=train,
        skipped=method.skipped_stages(settings) or None,
        check=check_figures,
        served_model=check.served_model,
        quarantine=quarantine,
        hardware=check.hardware or hardware(),
        versions=check.versions or versions(),
        seconds_by_stage=seconds,
    )
