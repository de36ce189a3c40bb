"""How many tokens the chain drafts: rates of held-out text over overheads of the device."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.decoding.held_out import HeldOutRanks
from pipeline.evaluation.choosing import chosen_chain


@pytest.fixture
def ranks() -> HeldOutRanks:
    """Two conversations of 60 positions, at which the first guesses of both heads are right."""
    return HeldOutRanks(
        np.zeros((2, 120), np.uint8), np.array([0, 60]), np.array([0, 1]), np.zeros(2, bool)
    )


@pytest.mark.parametrize(
    ("overheads", "drafted"),
    [
        ({1: 1.0, 2: 1.2}, 2),  # 2 tokens a step, or 3 in 1.2 times the time
        ({1: 1.0, 2: 2.0}, 1),
        ({1: 1.5, 2: math.nan}, 1),
        ({}, 5),
    ],
)
def test_the_chain_is_as_long_as_is_fastest(ranks, overheads, drafted):
    assert chosen_chain(ranks, 2, 5, overheads)[0] == drafted


def test_a_chain_s_speedup_is_its_rate_over_its_overhead(ranks):
    _, (one, two) = chosen_chain(ranks, 2, 2, {1: 1.25})
    assert (one.draft_tokens, two.draft_tokens) == (1, 2)
    assert one.expected_acceleration_rate == pytest.approx(2, rel=0.05)
    assert two.expected_acceleration_rate == pytest.approx(3, rel=0.05)
    speedup = one.expected_acceleration_rate / 1.25
    assert one.expected_speedup == pytest.approx(speedup, rel=1e-3)
    assert two.expected_speedup is None is two.overhead, "it was not timed"
