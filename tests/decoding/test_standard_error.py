"""Standard errors are those of the bootstrap, and as large as the rates of other conversations
really scatter.
"""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.held_out import NUM_RESAMPLES, estimated_rate

conversations = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=2, max_size=12)


@settings(max_examples=15, deadline=None)
@given(found=conversations)
def test_the_standard_error_is_the_bootstrap_s_over_conversations(found):
    """Drawn one by one, with other random numbers."""
    rng, rates = np.random.default_rng(1), []
    for _ in range(4 * NUM_RESAMPLES):
        drawn = [found[i] for i in rng.integers(len(found), size=len(found))]
        rates.append(sum(tokens for tokens, _ in drawn) / sum(steps for _, steps in drawn))
    estimate = estimated_rate(*zip(*found, strict=True))
    assert estimate.rate == pytest.approx(sum(t for t, _ in found) / sum(s for _, s in found))
    correction = math.sqrt(len(found) / (len(found) - 1))
    assert estimate.standard_error == pytest.approx(
        correction * statistics.pstdev(rates), rel=0.25, abs=1e-9
    )


@pytest.mark.parametrize("num_conversations", [12, 100])
def test_it_is_as_large_as_rates_of_other_conversations_scatter(num_conversations):
    rng = np.random.default_rng(0)

    def sample():
        steps_C = rng.integers(10, 60, num_conversations)
        ease_C = rng.gamma(
            4, 0.5, num_conversations
        )  # conversations differ, their own steps less so
        return steps_C + rng.poisson(ease_C * steps_C), steps_C

    samples = [sample() for _ in range(300)]
    scatter = statistics.stdev(tokens_C.sum() / steps_C.sum() for tokens_C, steps_C in samples)
    typical = statistics.mean(estimated_rate(*one).standard_error for one in samples[:60])
    assert typical == pytest.approx(scatter, rel=0.15)


def test_the_same_conversations_give_the_same_error_and_those_without_a_step_count_for_nothing():
    tokens, steps = [30, 12, 45, 20], [10, 9, 11, 8]
    assert (
        estimated_rate(tokens, steps)
        == estimated_rate([*tokens, 0], [*steps, 0])
        == estimated_rate(tokens, steps)
    )
    assert estimated_rate([3 * n for n in steps], steps).standard_error == pytest.approx(
        0, abs=1e-12
    )


def test_one_conversation_has_a_rate_and_no_known_error_and_none_has_neither():
    alone, nothing = estimated_rate([6], [2]), estimated_rate([], [])
    assert alone.rate == 3 and math.isnan(alone.standard_error)
    assert math.isnan(nothing.rate) and math.isnan(nothing.standard_error)
