"""Write the tables of docs/from-nothing-to-served.md: `python scripts/write_costs.py`.

Tokens, disk and memory follow the arithmetic of `plan`, from published configurations. Hours are
those of the target's and the heads' matrix products and of the reading of weights, keys and values,
at the share of a GPU's data sheet that was measured on an H100 (docs/benchmarks.md).
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipeline.artifacts.feature_rows import StateFormat  # noqa: E402
from pipeline.config.load import load_config  # noqa: E402
from pipeline.evaluation.batch_limits import (  # noqa: E402
    GPUS,
    sequences_in_memory,
)
from pipeline.evaluation.served_figures import NUM_IN_TURN  # noqa: E402
from pipeline.execution.machine import GIB  # noqa: E402
from pipeline.flow import STAGES  # noqa: E402
from pipeline.run.estimate import FP32, memory_of_stages, on_planned_gpus  # noqa: E402
from pipeline.run.resolved import resolve_run  # noqa: E402
from pipeline.targets.sizes import TargetSizes, parameter_counts  # noqa: E402
from pipeline.targets.spec import cached_numbers  # noqa: E402
from pipeline.training.checkpoints import KEPT  # noqa: E402
from pipeline.training.recipe import Recipe, make_recipe  # noqa: E402
from scripts.write_models import between  # noqa: E402
from tests.models.published import write  # noqa: E402

PAGE = ROOT / "docs" / "from-nothing-to-served.md"
CONFIG = ROOT / "configs" / "llama-3.yaml"

WRITTEN = 1_000  # tokens that the target writes in a conversation, over all turns
PROMPT = 300  # tokens of its prompts
REQUESTS = 256  # that vLLM answers at once
ENGINE_SHARE = 0.92  # of a GPU's memory, which vLLM takes
COMPUTED = 0.40  # of the peak: features 0.55 and training 0.53 of 741 TFLOP/s, of 989.5
READ = 0.49  # of the bandwidth: a plain step reads 14.5 GB in 8.9 ms, at 3,350 GB/s
NATIVE = 4  # methods: plain, the heads, and `check.baselines`
SERVED = 3  # methods in vLLM: plain, the heads, and `check.engine_baselines`
WARM_UPS = 2  # native passes over all prompts, so that every CUDA graph is captured
SECONDS = 3600


@dataclass(frozen=True)
class Machine:
    """A target and the GPU that its whole run has."""

    target: str  # the Hub id
    gpu: str  # a key of `GPUS`
    gigabytes: int


MACHINES = {
    "1b": Machine("meta-llama/Llama-3.2-1B-Instruct", "NVIDIA GeForce RTX 4090", 24),
    "8b": Machine("meta-llama/Llama-3.1-8B-Instruct", "NVIDIA H100 80GB HBM3", 80),
    "70b": Machine("meta-llama/Llama-3.3-70B-Instruct", "NVIDIA B200", 180),
}


class Costs:
    """What a run with recurrent heads costs on a machine.

    Attributes:
        conversations: The number of conversations of the configuration.
        states: Tokens that the target writes; each has one cached state.
        tokens: These and the prompts.
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
        self.gpu = GPUS[machine.gpu]
        self.conversations = self.run.config.seeds.sources[0].limit or 0
        self.states = self.conversations * WRITTEN
        self.tokens = self.conversations * (WRITTEN + PROMPT)
        self.positions = round(self.states * (1 - self.run.config.seeds.holdout))
        train = self.run.config.train
        hidden_size = self.run.shape.hidden_size
        self.recipe: Recipe = make_recipe(train, self.positions, hidden_size, self.run.kind)
        memory = memory_of_stages(self.run, sizes, self.positions)
        self.trained = next(stage.gradients for stage in memory if stage.name == "train") / FP32
        self.memory = {stage.name: stage for stage in memory}

    def computing(self, operations: float) -> float:
        """Return the seconds that multiplications and additions take."""
        return operations / (COMPUTED * self.gpu.tflops * 1e12)

    def reading(self, num_bytes: float) -> float:
        """Return the seconds in which the GPU reads bytes of its memory."""
        return num_bytes / (READ * self.gpu.bandwidth_gbs * 1e9)

    def generating(self) -> float:
        """Return the seconds in which the target writes its answers, half of a text being cached.

        As many requests are answered at once as memory holds, at most `REQUESTS`.
        """
        weights = self.sizes.weight_bytes()
        cached = cached_numbers(self.run.target_config) * self.sizes.itemsize
        memory = ENGINE_SHARE * self.machine.gigabytes * 1e9
        held = sequences_in_memory(memory, weights, cached * (WRITTEN + PROMPT))
        requests = min(REQUESTS, held)
        step = max(
            self.reading(weights + requests * cached * (WRITTEN + PROMPT) / 2),
            self.computing(2 * self.sizes.parameters * requests),
        )
        prompts = self.computing(2 * self.sizes.linear * self.conversations * PROMPT)
        return self.states / requests * step + prompts

    def caching(self) -> float:
        """Return the seconds of one forward of the layers over all conversations."""
        return self.computing(2 * self.sizes.linear * self.tokens)

    def training(self) -> float:
        """Return the seconds of training: each weight forward and twice backward.

        The frozen lm_head is multiplied once forward and once backward.
        """
        lm_head = self.run.shape.vocab_size * self.run.shape.hidden_size
        operations = self.run.config.train.num_heads * (6 * self.trained + 4 * lm_head)
        return self.computing(self.positions * self.recipe.epochs * operations)

    def checking(self) -> float:
        """Return the seconds of the check, if every step of its passes keeps one token.

        Natively the prompts are decoded one by one. A pass in vLLM decodes all of them at once, and
        then up to `NUM_IN_TURN` one by one; after the other methods it is made once more, plainly.
        """
        check = self.run.config.check
        prompts = int(check.prompts)
        natively = NATIVE * (check.repeats + WARM_UPS) * prompts
        served = (SERVED * check.repeats + 1) * (1 + min(prompts, NUM_IN_TURN))
        steps = (natively + served) * check.max_new_tokens
        return steps * self.reading(self.sizes.weight_bytes())

    def table(self) -> str:
        """Return the Markdown table of the run's stages."""
        dtype, hidden_size = self.run.target.torch_dtype, self.run.shape.hidden_size
        state_bytes = StateFormat(dtype, hidden_size, "native").stored_bytes
        train = self.memory["train"]
        checkpoints = KEPT * (train.heads + train.optimizer)
        weights = gigabytes(self.sizes.weight_bytes())
        cached = gigabytes(self.states * state_bytes)
        exported = gigabytes(self.trained * self.sizes.itemsize)
        written = f"{self.states / 1e6:,.0f}M"
        steps = f"{self.recipe.epochs} epochs of {self.recipe.steps_per_epoch:,} steps"
        times = (self.generating(), self.caching(), self.training(), self.checking())
        generating, caching, training, checking = map(hours, times)
        rows = [
            ("stage", "what it makes", "disk", "GPU memory", "time"),
            ("---",) * 5,
            ("seeds", f"{self.conversations:,} conversations", "", "", "download"),
            (
                "generate",
                f"{written} tokens",
                f"{weights}, the target",
                self.gib("generate"),
                generating,
            ),
            (
                "features",
                f"{written} states of {state_bytes:,} bytes",
                cached,
                self.gib("features"),
                caching,
            ),
            ("train", steps, f"{gigabytes(checkpoints)}, checkpoints", self.gib("train"), training),
            ("export", f"heads of {self.trained / 1e9:.2f}B numbers", exported, "", ""),
            ("check", "text compared, speed measured", "", self.gib("check, vllm"), checking),
            ("**together**", "", "", "", f"**{hours(sum(times))}**"),
        ]
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

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


def tables() -> dict[str, str]:
    """Return the Markdown table of each machine, by its mark in the page."""
    written = {}
    with tempfile.TemporaryDirectory() as directory:
        for name, machine in MACHINES.items():
            written[name] = Costs(machine, Path(directory) / name).table()
    return written


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for mark, table in tables().items():
        page = between(page, mark, table)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
