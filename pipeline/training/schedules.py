"""Schedules of the learning rate and the heads' weight: functions of the step alone, so that a resumed run agrees."""

from __future__ import annotations

import math
from typing import Literal


def cosine_with_warmup(step: int, total_steps: int, warmup_steps: int) -> float:
    """Linear from 0 to 1 over the warmup, then half a cosine down to 0 at `total_steps` (paper, appendix B).

    The same multiplier as transformers' `get_cosine_schedule_with_warmup`; 0 from `total_steps` on.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def heads_weight(
    step: int, total_steps: int, lambda_0: float, schedule: Literal["sine", "linear", "constant"]
) -> float:
    """What the heads' losses weigh beside the backbone's in step t of T (paper 2.2.2 and 2.3.2, appendix B).

    `sine`: lambda_0 · sin(pi/2 · t/T), a quarter wave, so that the heads do not disturb the backbone while they know
    nothing; `linear`: lambda_0 · t/T; `constant`: lambda_0.
    """
    progress = min(1.0, step / max(1, total_steps))
    shares = {"sine": math.sin(math.pi / 2 * progress), "linear": progress, "constant": 1.0}
    return lambda_0 * shares[schedule]
