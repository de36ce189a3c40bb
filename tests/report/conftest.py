"""One whole report as report.json has it, and the answers that it shows."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.artifacts.check_result import Sample
from pipeline.artifacts.json_form import from_json
from pipeline.report.check_tables import engine_cells
from pipeline.report.documents import print_report, render_html, report_texts
from pipeline.report.report import Report

HEADS = [
    {"labels": 99} | {f"top{k + 1}": p for k, p in enumerate(row)}
    for row in ((0.62, 0.74, 0.8, 0.82, 0.84), (0.4, 0.5, 0.6, 0.61, 0.66))
]

SPEED = {"acceleration_rate": 1.9, "overhead": 1.2, "speedup": 1.583}
RATES = {"tokens_per_second": 812.0, "baseline_tokens_per_second": 507.0, "speedup": 1.6}
TREE: dict[str, Any] = {
    "nodes": 5,
    "depth": 2,
    "expected_acceleration_rate": 2.098,
    "answers": 40,
    "seen_share": 0.0,
    "new": {"answers": 40},
    "num_speculative_tokens": 3,
    "chain": [],
}

REPORT: dict[str, Any] = {
    "versions": {"torch": "2.13.0", "vllm": "0.32.0"},
    "target": "someone/chat-7b",
    "method": "medusa-1",
    "num_heads": 2,
    "drafter": "Medusa heads, model unchanged, 2 heads",
    "run": {"name": "try-3", "date": "2024-05-06", "fingerprints": {"seeds": "a91c02be"}},
    "seeds": {"rows": 1200, "quarantined": 17},
    "generate": {"rows": 1180, "quarantined": 20, "tokens": 345678, "tokens_per_second": 2410.4},
    "features": {"positions": 300123, "bytes_per_position": 819.5, "tokens_per_second": 31000.0},
    "train": {
        "tokens": 600246,
        "tokens_per_second": 12000.0,
        "final_loss": 4.213,
        "drift": {
            "kl": 0.0123,
            "perplexity": {"original": 3.21, "tuned": 3.25},
            "perplexity_change": 0.0125,
            "greedy_agreement": 0.963,
            "positions": 5545,
        },
    },
    "heads": HEADS,
    "tree": TREE,
    "check": {
        "passed": True,
        "failures": [],
        "native": {
            "acceleration_rate": 1.987,
            "overhead": 1.234,
            "speedup": 1.61,
            "tokens_per_second": 412.3,
            "baseline_tokens_per_second": 256.1,
            "greedy_match": {"sequences": 32, "identical": 31, "ties": 1, "tokens": 2048},
            "tie_tolerance": 0.12,
            "prompts": 32,
            "skipped_prompts": 2,
            "categories": [
                {"category": "math", "prompts": 10, "acceleration_rate": 2.5, **RATES},
                {"category": "writing", "prompts": 22, "acceleration_rate": 1.1, **RATES},
            ],
        },
        "vllm": {
            "acceleration_rate": 1.713,
            "accepted_per_position": [0.5, 0.213],
            "greedy_match": {"sequences": 32, "identical": 32, "ties": 0, "tokens": 2048},
        },
    },
    "quarantine": {"seeds": {"duplicate": 12, "empty": 5}, "generate": {"degenerate-loop": 20}},
    "hardware": {"cpus": 2, "gpu": None},
    "seconds_by_stage": {"target": 80.0, "seeds": 1.2, "generate": 61.0, "train": 7300.0},
}

EXTRAS: dict[str, Any] = {
    "samples": [
        {
            "prompt": "Why a tree?",
            "tokens": [
                {"text": "One", "step": 0},
                {"text": " step,", "step": 1},
                {"text": " 多个词元", "step": 1},
            ],
        }
    ],
}


def typed(report: dict) -> Report:
    return from_json(Report, report)


def samples_of(extras: dict) -> list[Sample]:
    return [from_json(Sample, each) for each in extras.get("samples", ())]


def texts(report: dict, extras: dict) -> dict[str, str]:
    """report.json, report.md and report.html."""
    return report_texts(typed(report), samples_of(extras))


def html(report: dict, extras: dict) -> str:
    return render_html(typed(report), samples_of(extras))


def printed(report: dict, **options: Any) -> str:
    """The report in a terminal."""
    buffer = io.StringIO()
    print_report(typed(report), Console(file=buffer, **options), Path("my-run"))
    return buffer.getvalue()


def figures_of(report: dict) -> dict[str, str]:
    """The native figures of the check by label."""
    return engine_cells(typed(report))["native"]


def with_seen_answers(report: dict, num_new: int) -> None:
    """32 answers of the check, `num_new` of them new, and 40 of calibration, ten of them seen."""
    expected = {"expected_acceleration_rate": 4.0, "expected_standard_error": 0.2}
    new = {"answers": 30, "expected_acceleration_rate": 2.0, "expected_standard_error": 0.1}
    report["tree"] = TREE | expected | {"seen_share": 0.25, "new": new}
    new = {"answers": num_new}
    if num_new >= 8:
        new |= {"acceleration_rate": 2.1, "standard_error": 0.1}
    native = {"acceleration_rate": 2.3, "standard_error": 0.1, "new": new}
    report["check"]["native"] |= native | {"seen_share": 1 - num_new / 32}


@pytest.fixture
def report() -> dict[str, Any]:
    return copy.deepcopy(REPORT)


@pytest.fixture
def extras() -> dict[str, Any]:
    return copy.deepcopy(EXTRAS)
