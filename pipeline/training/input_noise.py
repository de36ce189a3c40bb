"""Noise on the states that heads read, so that they do not learn a small cache by heart (EAGLE,
arXiv 2401.15077).

EAGLE adds U(-0.1, 0.1) to every entry of a Llama target's states. States of other targets are
larger or smaller, so here the bound is relative: `train.noise` times the root mean square of the
state's own entries.

Letters: N positions, D hidden size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

BLOCK = 256  # positions whose noise one generator draws


def noisy(states_ND: Tensor, noise: float, seed: tuple[int, ...], first: int = 0) -> Tensor:
    """The states and uniform noise of up to `noise` times each one's RMS, in their own dtype.

    It is drawn from `seed` and each state's place, from `first` on, within what the seed stands
    for: the same states get the same noise however they are shared out.
    """
    if not noise or not len(states_ND):
        return states_ND
    stop, skipped = first + len(states_ND), first % BLOCK
    with torch.no_grad():
        blocks = [
            _uniform(states_ND, (*seed, block))
            for block in range(first // BLOCK, -(-stop // BLOCK))
        ]
        drawn_ND = torch.cat(blocks)[skipped : skipped + len(states_ND)]
        rms_N1 = states_ND.float().square().mean(1, keepdim=True).sqrt()
        added_ND = (2 * noise * rms_N1 * (drawn_ND - 0.5)).to(states_ND.dtype)
    return states_ND + added_ND


def _uniform(states_ND: Tensor, seed: tuple[int, ...]) -> Tensor:
    """A block of numbers in [0, 1), drawn on the states' device."""
    number = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    generator = torch.Generator(states_ND.device).manual_seed(number)
    return torch.rand(BLOCK, states_ND.shape[1], generator=generator, device=states_ND.device)
