"""How sure an acceleration rate is: a bootstrap over conversations.

A rate is a ratio of sums, tokens over steps. The steps of one conversation are alike, so that
conversations are drawn and not steps (Efron and Tibshirani, An Introduction to the Bootstrap,
chapters 6 and 8).

Letters: C conversations, B resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

NUM_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """An acceleration rate and its standard error; NaN where there is no step, or fewer than two
    conversations.
    """

    rate: float
    standard_error: float


def rate_of_answers(
    accepted: Sequence[Sequence[int]], conversations: Sequence[Hashable]
) -> Estimate:
    """The acceleration rate of answers, and its standard error, in any engine.

    Args:
        accepted: Per answer, the number of tokens that each forward after the prefill adds, cut
            where the text ends.
        conversations: Per answer, what stands for its conversation.
    """
    tokens: Counter[Hashable] = Counter()
    steps: Counter[Hashable] = Counter()
    for kept, conversation in zip(accepted, conversations, strict=True):
        tokens[conversation] += sum(kept)
        steps[conversation] += len(kept)
    return estimated_rate(list(tokens.values()), list(steps.values()))


def estimated_rate(tokens_C: npt.ArrayLike, steps_C: npt.ArrayLike, seed: int = 0) -> Estimate:
    """All tokens over all steps, and the standard error if as many conversations were drawn again.

    The resamples' deviation is too small by sqrt((C-1)/C), which is made up for. Conversations
    without a step count for nothing. The same seed gives the same figure.
    """
    tokens_C, steps_C = np.asarray(tokens_C, np.float64), np.asarray(steps_C, np.float64)
    tokens_C, steps_C = tokens_C[steps_C > 0], steps_C[steps_C > 0]
    num = len(steps_C)
    if num < 2:
        return Estimate(tokens_C.sum() / steps_C.sum() if num else math.nan, math.nan)
    times_BC = np.random.default_rng(seed).multinomial(num, np.full(num, 1 / num), NUM_RESAMPLES)
    rates_B = (times_BC @ tokens_C) / (times_BC @ steps_C)
    standard_error = float(rates_B.std() * math.sqrt(num / (num - 1)))
    return Estimate(float(tokens_C.sum() / steps_C.sum()), standard_error)
