"""Write the tables of docs/models.md: `python scripts/write_models.py`, from published sizes and `plan`'s arithmetic,
and from what `python -m benchmarks.run architectures` has found.

For each model and each room, the first change of settings with which every stage fits, of those that cost least first.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.config import Config, TargetConfig  # noqa: E402
from pipeline.config.load import load_config  # noqa: E402
from pipeline.execution.device_memory import GIB  # noqa: E402
from pipeline.run.budget import budgets  # noqa: E402
from pipeline.targets.sizes import TargetSizes, target_sizes  # noqa: E402
from pipeline.targets.spec import resolve  # noqa: E402
from tests.models.published import BY_ID, Published  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
RESULT = ROOT / "benchmarks" / "results" / "architectures.json"
ROOMS = {"one GPU of 24 GB": (1, 24), "one of 80 GB": (1, 80), "eight of 80 GB": (8, 80)}
CONFIGS = {
    "llama-3.yaml": [name for name in BY_ID if "Llama-3" in name],
    "qwen2.5-7b.yaml": [name for name in BY_ID if "Qwen2.5" in name],
    "qwen3.yaml": ["Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B"],
    "qwen3-thinking.yaml": ["Qwen/Qwen3-8B"],
    "mixture-of-experts.yaml": ["Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-Instruct-v0.1"],
    "mistral.yaml": [name for name in BY_ID if name.startswith("mistralai/Mistral-")],
    "gemma-3.yaml": [name for name in BY_ID if "gemma-3" in name],
    "phi-4.yaml": ["microsoft/phi-4"],
}
HEADS = {"recurrent": [], "medusa": ["train.heads=medusa"]}
SMALLER = {
    "recurrent": [[], ["train.optimizer=adamw-8bit"], ["train.optimizer=adamw-8bit", "train.batch_tokens=4096"]],
    "medusa": [
        [],
        ["train.optimizer=adamw-8bit"],
        ["train.medusa.lm_head=shared"],
        ["train.medusa.lm_head=shared", "export.formats=[shared]"],
        ["train.medusa.lm_head=shared", "train.optimizer=adamw-8bit"],
        ["train.medusa.lm_head=shared", "export.formats=[shared]", "train.optimizer=adamw-8bit"],
        ["train.medusa.lm_head=tied"],
        ["train.medusa.lm_head=tied", "train.optimizer=adamw-8bit", "train.batch_tokens=4096"],
    ],
}


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    page = between(page, "models", table())
    if RESULT.is_file():
        page = between(page, "kept", kept_table(json.loads(RESULT.read_text(encoding="utf-8"))["facts"]["families"]))
    PAGE.write_text(page, encoding="utf-8")


def between(page: str, mark: str, text: str) -> str:
    """The page with this text between the two marks of that name."""
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- /{mark} -->"
    before, _, rest = page.partition(begin)
    assert end in rest, f"the page has no {end.strip()} on a line of its own after {begin.strip()}"
    return before + begin + text + end + rest.partition(end)[2]


def kept_table(families: dict[str, dict[str, str]]) -> str:
    """What `python -m benchmarks.run architectures` found."""
    columns = ["recurrent, native", "recurrent, vLLM", "medusa, native", "medusa, vLLM"]
    lines = [["family", "flow", *columns], ["---"] * 6]
    lines += [[name, row["flow"], *(str(row.get(column, "-")) for column in columns)] for name, row in families.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def table() -> str:
    """One row per model and kind of heads."""
    heading = ["model", "configuration", "heads", "weights", "training", *ROOMS]
    lines = [heading, ["---"] * len(heading)]
    with tempfile.TemporaryDirectory() as directory:
        for config, names in CONFIGS.items():
            lines += itertools.chain.from_iterable(_rows(config, BY_ID[name], Path(directory)) for name in names)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _rows(config: str, model: Published, directory: Path) -> Iterator[list[str]]:
    target = model.write(directory / model.hub_id)
    for heads, words in HEADS.items():
        weights, training = sizes(config, target, words)
        rooms = [_cell(fitting(config, target, heads, *room)) for room in ROOMS.values()]
        link = f"[{config}](../configs/{config})"
        yield [model.hub_id, link, heads, f"{weights:.0f} GiB", f"{training:.0f} GiB", *rooms]


def _cell(words: list[str] | None) -> str:
    if words is None:
        return "no"
    return " ".join(f"`{word}`" for word in words) or "as it is"


def sizes(config: str, target: Path, words: list[str]) -> tuple[float, float]:
    """GiB of the target's weights, and of a step of training, where nothing is made smaller."""
    wanted = load_config(ROOT / "configs" / config, [f"target.model={target}", "placement.gpu_memory_gb=80", *words])
    found = {budget.stage: budget for budget in budgets(wanted, known(wanted))}
    return found["features"].memory.weights / GIB, found["train"].memory.total / GIB


def fitting(config: str, target: Path, heads: str, gpus: int, gb: int) -> list[str] | None:
    """The overrides with which all stages fit on so many GPUs of this size; None where none of those tried does."""
    for decoding, training in itertools.product(_decoding(gpus), SMALLER[heads]):
        words = [*decoding, *training]
        if not misfits(config, target, gb, HEADS[heads] + words):
            return words
    return None


def _decoding(gpus: int) -> Iterator[list[str]]:
    """Where the target decodes: on one GPU, on several for each worker, else in 8 or 4 bit."""
    for span in (span for span in (1, 2, 4, 8) if span <= gpus):
        stages = ("generate", "features") if span > 1 else ()
        yield [f"placement.{stage}.gpus_per_worker={span}" for stage in stages]
    natively = ["generate.engine=transformers", "check.engines=[native]"]  # vLLM has no bitsandbytes
    yield from ([f"target.quantization={bits}", *natively] for bits in ("8bit", "4bit"))


def misfits(config: str, target: Path, gb: int, words: list[str]) -> set[str]:
    """The stages that do not fit."""
    places = [f"target.model={target}", f"placement.gpu_memory_gb={gb}"]
    wanted = load_config(ROOT / "configs" / config, [*places, *words])
    return {budget.stage for budget in budgets(wanted, known(wanted)) if not budget.fits}


@functools.cache
def _sizes(target: str) -> TargetSizes:
    """As a worker on a GPU loads it."""
    found = target_sizes(resolve(TargetConfig(model=target), on_gpu=True))
    assert found is not None, "a published config.json is enough"
    return found


def known(config: Config) -> TargetSizes:
    """A target's sizes, counted once; its longest conversation is the configuration's."""
    sizes = _sizes(config.target.model)
    return replace(sizes, context=min(sizes.context, config.target.max_tokens or sizes.context))


if __name__ == "__main__":
    main()
