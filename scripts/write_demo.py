"""Put eight figures of a finished demo into the README: `python scripts/write_demo.py runs/demo`, after `make demo`."""

import json
import sys
from pathlib import Path
from typing import Any

from pipeline.report.formatting import with_error

PAGE = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- demo -->\n", "\n<!-- /demo -->"


def table(report: dict[str, Any]) -> str:
    """The rows, each with what the figure is."""
    native, vllm, tree = report["check"]["native"], report["check"]["vllm"], report["tree"]
    trees = {row["tree"]: row for row in native["studies"]["trees"]}
    stock = next(row for name, row in trees.items() if name.startswith("stock"))
    plain = native["baseline_tokens_per_second"]
    matched, served = native["greedy_match"], native["acceleration_rate"]
    rows = [
        ("figure", "measured", "what it is"),
        ("---", "---", "---"),
        ("Acceleration rate", f"{served:.2f}", "tokens kept per forward of the model; plain decoding has 1.00"),
        (
            "as expected by calibration",
            with_error(tree["expected_acceleration_rate"], tree["expected_standard_error"]),
            "the same, predicted from the heads' accuracy on held-out text before anything was decoded, with its "
            "standard error",
        ),
        (
            "with the authors' tree",
            f"{stock['acceleration_rate']:.2f}",
            f"the same heads with the {stock['nodes']} guesses that Medusa's authors chose for Vicuna-7B; "
            f"the run's own tree, searched for these heads, has {tree['nodes']}",
        ),
        (
            "Overhead",
            f"{native['overhead']:.2f}x",
            "time of a step with the tree over a plain step; large for this target, whose plain step takes "
            f"{1000 / plain:.1f} ms",
        ),
        ("Speedup", f"{native['speedup']:.2f}x", "acceleration rate over overhead"),
        (
            "Tokens per second",
            f"{plain:,.0f} → {native['tokens_per_second']:,.0f}",
            "the model alone, and with its heads, one prompt at a time",
        ),
        (
            "Greedy text identical",
            f"{matched['identical']} of {matched['sequences']}",
            "held-out prompts, compared token for token with plain decoding",
        ),
        (
            "Acceleration rate in vLLM",
            f"{vllm['acceleration_rate']:.2f}",
            f"the same export; vLLM verifies the best path of {vllm['num_speculative_tokens']} guesses and no tree; "
            f"{with_error(vllm['expected_acceleration_rate'], vllm['expected_standard_error'])} was predicted",
        ),
    ]
    return "\n".join("|---|---|---|" if row[0] == "---" else f"| {' | '.join(row)} |" for row in rows)


def main(run: str) -> None:
    report = json.loads(Path(run, "report.json").read_text(encoding="utf-8"))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table(report) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
