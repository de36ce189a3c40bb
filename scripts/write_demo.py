"""Write the figures of two finished demos into the README.

python scripts/write_demo.py runs/demo-recurrent runs/demo
"""

import json
import sys
from pathlib import Path

from pipeline.artifacts.json_form import from_json
from pipeline.formatting import rate
from pipeline.report.facts import expected_rate, measured_rate
from pipeline.report.report import Report

PAGE = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- demo -->\n", "\n<!-- /demo -->"
FIGURES = (
    "tokens per forward of the model",
    "the same, as predicted",
    "tokens per forward in vLLM (one chain)",
    "tokens per second, the model alone → with heads",
    "answers identical to the model's own",
)


def read_report(run: str) -> Report:
    """Read a run's report.json."""
    found = json.loads(Path(run, "report.json").read_text(encoding="utf-8"))
    return from_json(Report, found)


def figures(report: Report) -> list[str]:
    """Return a finished demo's cells, in the order of `FIGURES`."""
    native, vllm = report.native, report.vllm
    assert native is not None and vllm is not None
    matched = native.greedy_match
    plain, with_heads = native.baseline_tokens_per_second, native.tokens_per_second
    return [
        measured_rate(native),
        expected_rate(report.tree),
        measured_rate(vllm),
        f"{rate(plain)} → {rate(with_heads)}",
        f"{matched.identical} of {matched.sequences}",
    ]


def table(recurrent: Report, medusa: Report) -> str:
    """Format the README's table in Markdown."""
    assert recurrent.native is not None and medusa.tree is not None
    questions = recurrent.native.greedy_match.sequences
    lines = [
        f"| measured on {questions} new questions, with {medusa.tree.nodes} guesses per forward"
        " | recurrent heads | Medusa heads |",
        "|---|---|---|",
    ]
    for figure, one, other in zip(FIGURES, figures(recurrent), figures(medusa), strict=True):
        lines.append(f"| {figure} | {one} | {other} |")
    return "\n".join(lines)


def main(recurrent: str, medusa: str) -> None:
    """Replace the README's table by the figures of two demos."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    written = table(read_report(recurrent), read_report(medusa))
    PAGE.write_text(before + BEGIN + written + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
