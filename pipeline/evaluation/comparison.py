"""Is accelerated greedy output the target's own? Token for token, and where not: was it a tie?

Two forwards of different shapes round differently, so where the target's best two logits are closer than a stated
tolerance either token is its greedy choice. Only the first difference counts: after it the sequences are other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from pipeline.config import CheckConfig
from pipeline.evaluation.forward import last_positions
from pipeline.targets.spec import TargetSpec

GapAt = Callable[[list[int]], float]

# Where the target's top-2 logit gap is not above this, the choice is rounding's. In half precision logits themselves
# lie on a grid; this is four of its steps at logits of 16 to 32, where chat models' best ones are.
TIE_TOLERANCE = {"float32": 1e-4, "float16": 0.0625, "bfloat16": 0.5}


def tie_tolerance(target: TargetSpec, settings: CheckConfig) -> float:
    """The configured tolerance, else the dtype's."""
    return TIE_TOLERANCE[target.dtype] if settings.tie_tolerance is None else settings.tie_tolerance


@dataclass
class GreedyMatch:
    """How many sequences are identical, how many part at a tie, and what the others are."""

    sequences: int = 0
    identical: int = 0
    ties: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, int]:
        return {"sequences": self.sequences, "identical": self.identical, "ties": self.ties}


def compare(
    ids: Sequence[str],
    prompts: Sequence[list[int]],
    plain: Sequence[list[int]],
    other: Sequence[list[int]],
    gap_at: GapAt,
    tolerance: float,
) -> GreedyMatch:
    """Compare greedy sequences.

    Args:
        gap_at: The target's own top-2 logit gap after a prefix; asked only where sequences differ.
        tolerance: A gap up to it is a tie.
    """
    match = GreedyMatch(len(plain))
    for name, prompt, left, right in zip(ids, prompts, plain, other, strict=True):
        if left == right:
            match.identical += 1
            continue
        place = next(
            (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
        )
        gap = gap_at(prompt + left[:place])
        if gap <= tolerance:
            match.ties += 1
        else:
            match.differing.append(
                {
                    "id": name,
                    "at": place,
                    "gap": gap,
                    "plain": left[place : place + 4],
                    "other": right[place : place + 4],
                }
            )
    return match


def gap_of(model: PreTrainedModel) -> GapAt:
    """The target's own top-2 logit gap after a prefix, by one plain forward."""

    def gap_at(prefix: list[int]) -> float:
        _, logits_1V = last_positions(model, prefix, 1)
        best, second = logits_1V[0].double().topk(2).values.tolist()
        return best - second

    return gap_at
