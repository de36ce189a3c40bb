"""Write eight figures of a finished demo into the README: `python scripts/write_demo.py runs/demo`.

If some answers are in the training text, rates have a second column, for new answers only.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.check_result import STOCK_TREE
from pipeline.artifacts.json_form import from_json
from pipeline.formatting import ratio, times
from pipeline.report.facts import expected_rate, measured_rate, on_new_answers
from pipeline.report.report import Report

PAGE = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- demo -->\n", "\n<!-- /demo -->"


@dataclass(frozen=True)
class Row:
    figure: str
    measured: str
    meaning: str
    on_new: str = ""


def rows_of(report: Report) -> list[Row]:
    """Return the rows of the README's table: each figure with its meaning."""
    native, vllm = report.native, report.vllm
    tree = report.tree
    assert native is not None and vllm is not None and tree is not None
    assert native.studies is not None and native.baseline_tokens_per_second is not None
    (stock,) = [row for row in native.studies.trees or [] if row.tree == STOCK_TREE]
    plain = native.baseline_tokens_per_second
    matched = native.greedy_match
    num_guesses = vllm.num_speculative_tokens
    return [
        Row(
            "Acceleration rate",
            measured_rate(native),
            "tokens kept per forward of the model; plain decoding has 1.00",
            on_new_answers(native),
        ),
        Row(
            "as expected by calibration",
            expected_rate(tree),
            "the same, predicted from the heads' accuracy on held-out text before anything was"
            " decoded, with its standard error",
            expected_rate(tree.new),
        ),
        Row(
            "with the authors' tree",
            ratio(stock.acceleration_rate),
            f"the same heads with the {stock.nodes} guesses that Medusa's authors chose for"
            f" Vicuna-7B; the run's own tree, searched for these heads, has {tree.nodes}",
        ),
        Row(
            "Overhead",
            times(native.overhead),
            "time of a step with the tree over a plain step; large for this target, whose plain"
            f" step takes {1000 / plain:.1f} ms",
        ),
        Row("Speedup", times(native.speedup), "acceleration rate over overhead"),
        Row(
            "Tokens per second",
            f"{plain:,.0f} → {native.tokens_per_second:,.0f}",
            "the model alone, and with its heads, one prompt at a time",
        ),
        Row(
            "Greedy text identical",
            f"{matched.identical} of {matched.sequences}",
            "held-out prompts, compared token for token with plain decoding",
        ),
        Row(
            "Acceleration rate in vLLM",
            measured_rate(vllm),
            f"the same export; vLLM verifies the best path of {num_guesses} guesses and no tree; "
            f"{expected_rate(vllm)} was predicted",
            on_new_answers(vllm),
        ),
    ]


def table(report: Report) -> str:
    """Format the table in Markdown; it has a column for new answers unless all are new."""
    rows = rows_of(report)
    share = report.native.seen_share if report.native else None
    if not share:
        lines = ["| figure | measured | what it is |", "|---|---|---|"]
        lines += [f"| {row.figure} | {row.measured} | {row.meaning} |" for row in rows]
        return "\n".join(lines)
    lines = [
        f"| figure | measured | on new answers ({1 - share:.0%}) | what it is |",
        "|---|---|---|---|",
    ]
    lines += [f"| {row.figure} | {row.measured} | {row.on_new} | {row.meaning} |" for row in rows]
    return "\n".join(lines)


def main(run: str) -> None:
    found = json.loads(Path(run, "report.json").read_text(encoding="utf-8"))
    report = from_json(Report, found)
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(report) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
