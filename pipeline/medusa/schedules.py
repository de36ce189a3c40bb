"""Learning-rate schedules: multipliers of the peak rate, functions of the step alone, so that a resumed run agrees."""

from __future__ import annotations

import math


def cosine_with_warmup(step: int, total_steps: int, warmup_steps: int) -> float:
    """Linear from 0 to 1 over the warmup, then half a cosine down to 0 at `total_steps` (paper, appendix B).

    The same multiplier as transformers' `get_cosine_schedule_with_warmup`; 0 from `total_steps` on.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 0.5 * (1.0 + math.cos(math.pi * progress))
