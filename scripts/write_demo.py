"""Write the figures of three finished demos into the README.

python scripts/write_demo.py runs/demo-eagle3 runs/demo-recurrent runs/demo
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.artifacts.json_form import from_json
from pipeline.formatting import rate
from pipeline.report.facts import expected_rate, measured_rate
from pipeline.report.report import Report

PAGE = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- demo -->\n", "\n<!-- /demo -->"
KINDS = ("EAGLE-3 heads", "recurrent heads", "Medusa heads")
FIGURES = (
    "tokens per forward pass",
    "as predicted",
    "tokens per forward pass in vLLM",
    "tokens per second, PyTorch decoder: plain → with heads",
    "answers identical",
    "epochs; Medusa heads or draft steps",
)


def read_report(run: str) -> Report:
    """Read a run's report.json."""
    found = json.loads(Path(run, "report.json").read_text(encoding="utf-8"))
    return from_json(Report, found)


def figures(report: Report) -> list[str]:
    """Return a finished demo's cells, in the order of `FIGURES`."""
    native, vllm, train = report.native, report.vllm, report.train
    assert native is not None and vllm is not None
    assert train is not None and train.hyperparameters is not None
    matched = native.greedy_match
    plain, with_heads = native.baseline_tokens_per_second, native.tokens_per_second
    return [
        measured_rate(native),
        expected_rate(report.tree),
        measured_rate(vllm),
        f"{rate(plain)} → {rate(with_heads)}",
        f"{matched.identical} of {matched.sequences}",
        f"{train.hyperparameters['epochs']}; {report.num_heads}",
    ]


def table(reports: Sequence[Report]) -> str:
    """Format the README's table in Markdown, from a report of each of `KINDS`."""
    first = reports[0]
    assert first.native is not None and first.tree is not None
    questions = first.native.greedy_match.sequences
    title = f"{questions} held-out questions, {first.tree.nodes} guesses per forward pass"
    lines = [f"| {title} | {' | '.join(KINDS)} |", "|---" * (1 + len(KINDS)) + "|"]
    for row in zip(FIGURES, *map(figures, reports), strict=True):
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def main(*runs: str) -> None:
    """Replace the README's table by the figures of a demo of each of `KINDS`."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    written = table([read_report(run) for run in runs])
    PAGE.write_text(before + BEGIN + written + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
