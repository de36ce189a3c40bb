"""What a step costs in the engine that serves the heads, by how many tokens it drafts; timed in vLLM before the export.

Kinds differ: a recurrent chain is drafted token by token, Medusa's heads are evaluated at once, and neither costs what
native decoding does. Timed are plain decoding and the shortest and the longest chain, and between them lies a straight
line: each further token adds a row to verify and, of a recurrent chain, a draft step. (With the demo's target and
recurrent chains of 1, 3, 7, 10 and 14 tokens: 4.1, 5.7, 8.9, 10.7 and 16.3 ms; the line says 5.9, 9.7 and 12.5.)
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import write_export
from pipeline.export.layout import ExportLayout
from pipeline.storage.atomic import remove
from pipeline.targets.spec import TargetSpec, context_length, load_tokenizer, model_config
from pipeline.targets.vllm_step_times import NUM_NEW_TOKENS, StepTime, step_times

NUM_PROMPTS = 4


@dataclass(frozen=True)
class StepCosts:
    """Seconds of a step: plain, and with so many draft tokens, as timed."""

    plain: float
    drafting: dict[int, float]  # one number at least
    spread: float = 0.0  # the largest of their rounds, as `StepTime` has it
    settled: bool = True  # whether two rounds agreed on each
    threads: int | None = None  # of the CPU, with which plain steps were fastest; drafting steps used as many

    @classmethod
    def of_times(cls, plain: StepTime, drafting: Mapping[int, StepTime]) -> StepCosts | None:
        """What was timed; None where the context has no room for a plain step and one that drafts."""
        times = {number: time for number, time in drafting.items() if math.isfinite(time.seconds)}
        if not times or not math.isfinite(plain.seconds):
            return None
        spread = max(time.spread for time in (plain, *times.values()))
        settled = all(time.settled for time in (plain, *times.values()))
        seconds = {number: time.seconds for number, time in times.items()}
        return cls(plain.seconds, seconds, spread, settled, plain.threads)

    def overheads(self, most: int) -> dict[int, float]:
        """Each number's step over a plain one, up to `most`: timed, or on the line between its timed neighbours.

        A longer chain is taken to cost no less than a shorter one: where it was timed as less, the machine was
        disturbed.
        """
        timed, highest = [], 0.0
        for number, seconds in sorted(self.drafting.items()):
            highest = max(highest, seconds)
            timed.append((number, highest))
        found = {number: seconds / self.plain for number, seconds in timed}
        for (left, low), (right, high) in pairwise(timed):
            for number in range(left + 1, right):
                found[number] = (low + (high - low) * (number - left) / (right - left)) / self.plain
        return {number: found[number] for number in sorted(found) if number <= most and math.isfinite(found[number])}

    def to_json(self) -> dict[str, Any]:
        """For the stage's record and the report, in milliseconds."""
        drafting = [{"draft_tokens": number, "ms": 1000 * seconds} for number, seconds in sorted(self.drafting.items())]
        spread = {"spread": self.spread, "settled": self.settled}
        spread |= {"threads": self.threads} if self.threads else {}
        return {"engine": "vllm", "plain_ms": 1000 * self.plain, "steps": drafting, **spread}


def is_installed() -> bool:
    """Whether vLLM can be asked here."""
    return importlib.util.find_spec("vllm") is not None


def draft_costs(
    target: TargetSpec,
    heads: str,
    most: int,
    prompts: Sequence[Sequence[int]],
    scratch: str,
    gpus: int,
    progress: ProgressReporter | None = None,
) -> StepCosts | None:
    """The costs of a step with these trained heads in vLLM; None without vLLM, or room for a step.

    Args:
        heads: Their file.
        most: The most tokens that they can draft.
        prompts: Each is cut at its beginning where the context leaves too little room: beyond it vLLM drafts nothing,
            and its steps are shorter (see `vllm_decode`).
        scratch: A directory for the heads as vLLM reads them, which is removed.

    Raises:
        EnvironmentFault: vLLM cannot start here, or the disk is full.
    """
    if not is_installed():
        return None
    room, directory = context_length(target), Path(scratch)
    few = [list(ids[-max(1, room - NUM_NEW_TOKENS - 2 * most) :]) for ids in prompts[:NUM_PROMPTS]]
    remove(directory)  # what a killed run left
    try:
        layout = _write(target, Path(heads), directory)
        numbers = sorted({1, most})
        if progress:
            progress.begin("vLLM starts, to time its steps", 0)
        chosen = [layout.kind.speculative_config(str(directory.resolve()), number) for number in numbers]
        plain, *found = step_times(
            target,
            [{}, *({"speculative_config": config} for config in chosen)],
            few,
            gpus=gpus,
            told=progress.report if progress else None,
        )
    finally:
        with contextlib.suppress(OSError):  # a file that the engine still holds does not cost the times
            remove(directory)
    return StepCosts.of_times(plain, dict(zip(numbers, found, strict=True)))


def _write(target: TargetSpec, file: Path, directory: Path) -> ExportLayout:
    """The heads in the target's dtype, as an engine reads them; their tree is not read."""
    heads = read_trained_heads(file)
    layout = ExportLayout(target.model, heads.shape, dtype=target.dtype)
    config = model_config(target).to_dict()
    write_export(directory, heads, layout, target=config, tokenizer=load_tokenizer(target), choices=[[0]], card="")
    return layout
