"""Write the table of docs/get-started.md: `python scripts/write_costs.py`.

Tokens, disk, memory and hours follow the arithmetic of `plan`, from published configurations.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.artifacts.state_format import StateFormat  # noqa: E402
from pipeline.config.load import load_config  # noqa: E402
from pipeline.evaluation.gpu_figures import GPUS  # noqa: E402
from pipeline.execution.machine import GIB  # noqa: E402
from pipeline.flow import STAGES  # noqa: E402
from pipeline.run.estimate import (  # noqa: E402
    FP32,
    RunSize,
    memory_of_stages,
    on_planned_gpus,
)
from pipeline.run.hours import Hours, Rates  # noqa: E402
from pipeline.run.resolved import resolve_run  # noqa: E402
from pipeline.targets.sizes import TargetSizes, parameter_counts  # noqa: E402
from pipeline.training.checkpoints import KEPT  # noqa: E402
from pipeline.training.recipe import Recipe, make_recipe  # noqa: E402
from scripts.write_models import between  # noqa: E402
from tests.models.published import write  # noqa: E402

PAGE = ROOT / "docs" / "get-started.md"
CONFIG = ROOT / "configs" / "llama-3.yaml"

WRITTEN = 1_000  # tokens that the target writes in a conversation, over all turns
SECONDS = 3600


@dataclass(frozen=True)
class Machine:
    """A target and the GPU that its whole run has."""

    target: str  # the Hub id
    gpu: str  # a key of `GPUS`
    gigabytes: int


MACHINES = {
    "1B, RTX 4090 (24 GB)": Machine(
        "meta-llama/Llama-3.2-1B-Instruct", "NVIDIA GeForce RTX 4090", 24
    ),
    "8B, H100 (80 GB)": Machine("meta-llama/Llama-3.1-8B-Instruct", "NVIDIA H100 80GB HBM3", 80),
    "70B, B200 (180 GB)": Machine("meta-llama/Llama-3.3-70B-Instruct", "NVIDIA B200", 180),
}


class Costs:
    """What a run with recurrent heads costs on a machine.

    Attributes:
        conversations: The number of conversations of the configuration.
        states: Tokens that the target writes; each has one cached state.
        hours: The arithmetic of `plan` for the time of each stage.
        trained: The number of trained parameters.
    """

    def __init__(self, machine: Machine, directory: Path):
        target = write(machine.target, directory)
        places = [f"target.model={target}", f"placement.gpu_memory_gb={machine.gigabytes}"]
        self.run = on_planned_gpus(resolve_run(load_config(CONFIG, places), tuple(STAGES)))
        sizes = parameter_counts(self.run.target, self.run.target_config)
        assert sizes is not None, "a published config.json is enough"
        self.machine = machine
        self.sizes: TargetSizes = sizes
        self.conversations = self.run.config.seeds.sources[0].limit or 0
        self.states = self.conversations * WRITTEN
        self.positions = round(self.states * (1 - self.run.config.seeds.holdout))
        train = self.run.config.train
        hidden_size = self.run.shape.hidden_size
        self.recipe: Recipe = make_recipe(train, self.positions, hidden_size, self.run.kind)
        memory = memory_of_stages(self.run, sizes, self.positions)
        self.trained = next(stage.gradients for stage in memory if stage.name == "train") / FP32
        self.memory = {stage.name: stage for stage in memory}
        dtype = self.run.target.torch_dtype
        self.size = RunSize(
            conversations=self.conversations,
            samples=1,
            tokens=self.states,
            bytes_per_position=StateFormat(dtype, hidden_size, "native").stored_bytes,
            row_layers=0,
            is_bound=True,
            positions=self.positions,
            recipes=(self.recipe,),
        )
        rates = Rates.of_gpu(GPUS[machine.gpu], machine.gigabytes * 1e9)
        sections = self.run.config.placement.of_stages()
        self.hours = Hours(self.run, self.size, sizes, dict.fromkeys(sections, rates))

    def column(self) -> dict[str, str]:
        """Return what the run costs, by the label of the table's row."""
        train, times = self.memory["train"], self.hours.stages()
        written = f"{self.states / 1e6:,.0f}M"
        steps = f"{self.recipe.epochs} epochs of {self.recipe.steps_per_epoch:,} steps"
        return {
            f"generate: {written} tokens": hours(times["generate"]),
            f"features: {written} states": hours(times["features"]),
            f"train: {steps}": hours(times["train"]),
            "check": hours(times["check"]),
            "**all stages**": f"**{hours(sum(times.values()))}**",
            "disk: the target": gigabytes(self.sizes.weight_bytes()),
            "disk: states": gigabytes(self.size.disk_bytes or 0),
            "disk: row states of a layer (EAGLE-3)": gigabytes(self.size.layer_bytes),
            "disk: checkpoints": gigabytes(KEPT * (train.heads + train.optimizer)),
            "disk: heads, exported": gigabytes(self.trained * self.sizes.itemsize),
            "GPU memory: generate": self.gib("generate"),
            "GPU memory: train": self.gib("train"),
            "GPU memory: check": self.gib("check, vllm"),
        }

    def gib(self, name: str) -> str:
        return f"{self.memory[name].total / GIB:.0f} GiB"


def gigabytes(num_bytes: float) -> str:
    if num_bytes < 9.95e9:
        return f"{num_bytes / 1e9:.1f} GB"
    return f"{num_bytes / 1e9:,.0f} GB"


def hours(seconds: float) -> str:
    if seconds < SECONDS:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / SECONDS:.1f} h"


def table() -> str:
    """Return the Markdown table, with a column per machine."""
    with tempfile.TemporaryDirectory() as directory:
        columns = [
            Costs(machine, Path(directory) / str(number)).column()
            for number, machine in enumerate(MACHINES.values())
        ]
    rows = [["", *MACHINES], ["---"] * (1 + len(MACHINES))]
    rows += [[label, *(column[label] for column in columns)] for label in columns[0]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(between(page, "costs", table()), encoding="utf-8")


if __name__ == "__main__":
    main()
