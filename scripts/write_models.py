"""Write the memory of models to docs/models.md and a CSV file: `python scripts/write_models.py`.

It is computed from published configurations with the arithmetic of `plan`.
"""

from __future__ import annotations

import csv
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
GRID = ROOT / "benchmarks" / "results" / "memory.csv"
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
COLUMNS = ["model", "configuration", "heads", "weights_gib", "training_gib", "one_gpu_of_gb"]
ON_PAGE = (
    "meta-llama/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen2.5-14B-Instruct",
    "Qwen/Qwen2.5-32B-Instruct",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "mistralai/Mistral-7B-Instruct-v0.3",
    "mistralai/Mistral-Small-24B-Instruct-2501",
    "google/gemma-3-12b-it",
    "google/gemma-3-27b-it",
    "microsoft/phi-4",
)


def main() -> None:
    rows = grid()
    with GRID.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([COLUMNS, *rows])
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(between(page, "models", table(rows)), encoding="utf-8")


def between(page: str, mark: str, text: str) -> str:
    """Return the page with `text` between the begin and the end comment of the name `mark`."""
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- /{mark} -->"
    before, _, rest = page.partition(begin)
    assert end in rest, f"the page has no {end.strip()} on a line of its own after {begin.strip()}"
    return before + begin + text + end + rest.partition(end)[2]


def grid() -> list[list[str]]:
    """Return the rows of the CSV file: one per configuration, model and kind of heads."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for config, names in CONFIGS.items():
            for name in names:
                target = write(name, Path(directory) / name)
                rows += [row(config, name, target, heads) for heads in HEADS]
    return rows


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format the Markdown table, with a row per model, from the rows of the CSV file."""
    heading = ["model", "weights"]
    heading += [f"{part}, {heads}" for heads in HEADS for part in ("training", "one GPU of")]
    lines = [heading, ["---"] * len(heading)]
    for name in ON_PAGE:
        by_heads = {cells[2]: cells[3:] for cells in rows if cells[0] == name}
        weights = by_heads["recurrent"][0]
        line = [name.partition("/")[2], f"{weights} GiB"]
        for _, training, gpu in by_heads.values():
            line += [f"{training} GiB", f"{gpu} GB" if gpu else "–"]
        lines.append(line)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def row(config: str, name: str, target: Path, heads: str) -> list[str]:
    """Return a row of the CSV file: a model's memory with a kind of heads, and the smallest GPU."""
    found = {each.stage: each for each in memory(config, target, GPUS[-1], HEADS[heads])}
    weights, training = (
        f"{size / GIB:.0f}" for size in (found["features"].weights, found["train"].total)
    )
    return [name, config, heads, weights, training, smallest_gpu(config, target, HEADS[heads])]


def smallest_gpu(config: str, target: Path, words: Sequence[str]) -> str:
    """Return the GB of the smallest of `GPUS` that holds every stage; empty if none does."""
    for gb in GPUS:
        if fits(config, target, gb, words):
            return str(gb)
    return ""


def fits(config: str, target: Path, gb: int, words: Sequence[str] = ()) -> bool:
    """Return whether every stage fits into a GPU of `gb` GB."""
    for stage in memory(config, target, gb, words):
        cache = 0 if stage.name == "train" else GIB  # keys and values of a few texts
        if stage.total + cache > (stage.device_bytes or 0):
            return False
    return True


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
