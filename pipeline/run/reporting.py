"""Assembles a run's report from its stages' summaries and writes it."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from pipeline.artifacts.check_result import CheckResult, Limits
from pipeline.artifacts.json_form import from_json, to_json
from pipeline.artifacts.tree_file import read_calibration
from pipeline.config import Config
from pipeline.execution.machine import hardware, versions
from pipeline.export.card import model_card
from pipeline.export.card_facts import Published
from pipeline.export.hub import repositories
from pipeline.export.licence import Licence
from pipeline.heads.kinds import head_kind
from pipeline.report.documents import report_texts
from pipeline.report.terminal import print_report
from pipeline.run.context import Context
from pipeline.storage.atomic import write_text
from pipeline.storage.run_directory import RunDirectory
from pipeline.training.methods import method_of
from pipeline.training.metrics import FILE as METRICS_FILE
from pipeline.training.metrics import read_curves

REPORTED_STAGES = ("seeds", "generate", "features", "train")
SUMMARY_KEYS = (
    "rows",
    "quarantined",
    "tokens",
    "tokens_per_second",
    "positions",
    "bytes_per_position",
    "final_loss",
    "steps",
    "best_step",
    "hyperparameters",
    "warnings",
    "drift",
    "quantization",
    "draft_coverage",
    "sources",
    "special_token_rows",
    "tool_rows",
    "cut_at_tools",
)


def publish_report(context: Context) -> dict[str, Any]:
    """Write report.json, .md and .html into the run, renew the export's model card, and print the
    report.
    """
    report, extras = assemble(context.run, context.config)
    for name, text in report_texts(report, extras).items():
        write_text(context.run.path / name, text)
    if export := context.run.latest("export"):
        write_text(export.path / "README.md", card(report, context.config))
    print_report(report, context.console, extras)
    return report


def assemble(
    run: RunDirectory, config: Config, without: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The content of report.json, and data for the drawings, made of the stages' records; partial
    for an unfinished run, and without some stages.

    Speeds, hardware, versions and a Hub target's commit, the `target_revision`, are the check's.
    """
    found = {
        name: stage for name, stage in run.stages().items() if stage.done and name not in without
    }
    summaries = {name: stage.summary for name, stage in found.items()}
    checked = from_json(CheckResult, summaries.get("check", {}))
    report: dict[str, Any] = {
        "target": config.target.model,
        **({"target_revision": checked.target_revision} if checked.target_revision else {}),
        "method": config.train.method,
        "num_heads": config.train.num_heads,
        "drafter": f"{config.train.num_heads} {head_kind(config.train.heads).units}",
        **{name: _selected(summaries[name]) for name in REPORTED_STAGES if name in summaries},
        **(
            {"skipped": skipped}
            if (skipped := method_of(config.train).skipped(config.train))
            else {}
        ),
        "heads": summaries.get("calibrate", {}).get("heads", []),
        "tree": summaries.get("calibrate", {}).get("tree", {}),
        **({"export": {"vllm": summaries["export"]["vllm"]}} if "export" in summaries else {}),
        "check": to_json(checked.figures(Limits.of(config))) if "check" in summaries else {},
        **({"served_model": to_json(checked.served_model)} if checked.served_model else {}),
        "target_text": to_json(checked.target_text) if checked.target_text else None,
        "quarantine": {
            name: summary["reasons"]
            for name, summary in summaries.items()
            if summary.get("reasons")
        },
        "hardware": checked.hardware or hardware(),
        "versions": checked.versions or versions(),
        "seconds_by_stage": {
            name: summary["seconds"] for name, summary in summaries.items() if "seconds" in summary
        },
        "run": {
            "name": config.run.name,
            "date": time.strftime("%Y-%m-%d"),
            "fingerprints": {name: stage.fingerprint[:8] for name, stage in found.items()},
        },
    }
    if "train" in report:
        report["train"] |= method_of(config.train).reported(config.train)
        # Training has measured the adapter, the check the published weights.
        if checked.drift and checked.drift.positions:
            report["train"] |= {
                "drift": to_json(checked.drift),
                "adapter_drift": report["train"].get("drift"),
            }
    extras: dict[str, Any] = {"samples": [to_json(sample) for sample in checked.samples]}
    if "calibrate" in found:
        extras["tree"] = to_json(read_calibration(found["calibrate"].path))
    if "train" in found and found["train"].intact(METRICS_FILE):  # no run makes a damaged log again
        extras["losses"], extras["held_out"] = read_curves(found["train"].path)
    return report, extras


def card(report: dict[str, Any], config: Config) -> str:
    """The model card from the current report."""
    tuned = method_of(config.train).tunes_backbone
    kind = head_kind(config.train.heads)
    to = repositories(config.push, kind, config.target.model, tuned=tuned)
    return model_card(
        Published(
            report,
            config,
            repo_id=to.heads,
            base_model=to.backbone if tuned else config.target.model,
            tuned=tuned,
            licence=Licence(config.push.license) if config.push.license else None,
            data_set=to.data_set,
        )
    )


def _selected(summary: dict[str, Any]) -> dict[str, Any]:
    found = {key: value for key, value in summary.items() if key in SUMMARY_KEYS}
    return found | {key: int(found[key]) for key in ("tokens", "positions") if key in found}
