"""Write the tables of docs/models.md: `python scripts/write_models.py`.

They are computed from published configurations with the arithmetic of `plan`, and from the result
of `python -m benchmarks.run architectures`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config.load import load_config  # noqa: E402
from pipeline.execution.machine import GIB  # noqa: E402
from pipeline.flow import STAGES  # noqa: E402
from pipeline.run.estimate import (  # noqa: E402
    StageMemory,
    memory_of_stages,
    on_planned_gpus,
)
from pipeline.run.resolved import resolve_run  # noqa: E402
from pipeline.targets.sizes import TargetSizes, parameter_counts  # noqa: E402
from pipeline.targets.spec import TargetSpec, model_config  # noqa: E402
from tests.models.published import PUBLISHED, write  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
RESULT = ROOT / "benchmarks" / "results" / "architectures.json"
GPUS = (24, 48, 80)  # GB
CONFIGS = {
    "llama-3.yaml": [name for name in PUBLISHED if "Llama-3" in name],
    "qwen2.5-7b.yaml": [name for name in PUBLISHED if "Qwen2.5" in name],
    "qwen3.yaml": ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B"],
    "qwen3-thinking.yaml": ["Qwen/Qwen3-8B"],
    "mixture-of-experts.yaml": ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-Instruct-v0.1"],
    "mistral.yaml": [name for name in PUBLISHED if name.startswith("mistralai/Mistral-")],
    "gemma-3.yaml": [name for name in PUBLISHED if "gemma-3" in name],
    "phi-4.yaml": ["microsoft/phi-4"],
}
HEADS = {"recurrent": [], "medusa": ["train.heads=medusa"]}


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    page = between(page, "models", table())
    if RESULT.is_file():
        page = between(
            page,
            "kept",
            kept_table(json.loads(RESULT.read_text(encoding="utf-8"))["facts"]["families"]),
        )
    PAGE.write_text(page, encoding="utf-8")


def between(page: str, mark: str, text: str) -> str:
    """Return the page with `text` between the begin and the end comment of the name `mark`."""
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- /{mark} -->"
    before, _, rest = page.partition(begin)
    assert end in rest, f"the page has no {end.strip()} on a line of its own after {begin.strip()}"
    return before + begin + text + end + rest.partition(end)[2]


def kept_table(families: dict[str, dict[str, str]]) -> str:
    """Format the result of `python -m benchmarks.run architectures` as a Markdown table."""
    columns = ["recurrent, native", "recurrent, vLLM", "medusa, native", "medusa, vLLM"]
    lines = [["family", "flow", *columns], ["---"] * 6]
    lines += [
        [name, row["flow"], *(str(row.get(column, "-")) for column in columns)]
        for name, row in families.items()
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table() -> str:
    """Format the Markdown table of memory, with a row per model and kind of heads."""
    heading = [
        "model",
        "configuration",
        "heads",
        "weights",
        "training",
        "fits as it is on one GPU of",
    ]
    lines = [heading, ["---"] * len(heading)]
    with tempfile.TemporaryDirectory() as directory:
        for config, names in CONFIGS.items():
            for name in names:
                target = write(name, Path(directory) / name)
                lines += [row(config, name, target, heads) for heads in HEADS]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def row(config: str, name: str, target: Path, heads: str) -> list[str]:
    """Return a table row: a model's memory with a kind of heads, and the smallest GPU for it."""
    found = {each.stage: each for each in memory(config, target, GPUS[-1], HEADS[heads])}
    weights, training = (
        f"{size / GIB:.0f} GiB" for size in (found["features"].weights, found["train"].total)
    )
    link = f"[{config}](../configs/{config})"
    return [name, link, heads, weights, training, smallest_gpu(config, target, HEADS[heads])]


def smallest_gpu(config: str, target: Path, words: Sequence[str]) -> str:
    for gb in GPUS:
        if fits(config, target, gb, words):
            return f"{gb} GB"
    return "–"


def fits(config: str, target: Path, gb: int, words: Sequence[str] = ()) -> bool:
    """Return whether every stage fits into a GPU of `gb` GB."""
    return all(each.fits(0) for each in memory(config, target, gb, words))


def memory(config: str, target: Path, gb: int, words: Sequence[str] = ()) -> list[StageMemory]:
    places = [f"target.model={target}", f"placement.gpu_memory_gb={gb}"]
    wanted = load_config(ROOT / "configs" / config, [*places, *words])
    run = on_planned_gpus(resolve_run(wanted, tuple(STAGES)))
    return memory_of_stages(run, sizes_of(run.target))


@cache
def sizes_of(target: TargetSpec) -> TargetSizes:
    """The parameter counts of a published model, which is built once for all rows."""
    sizes = parameter_counts(target, model_config(target))
    assert sizes is not None, "a published config.json is enough"
    return sizes


if __name__ == "__main__":
    main()
