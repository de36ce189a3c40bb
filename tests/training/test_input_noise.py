"""Noise on the heads' input states: how large, and that nobody draws another."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import TrainConfig
from pipeline.training.input_noise import BLOCK, noisy
from tests.training.trainings import trainer_of

NUM = 3 * BLOCK + 40
STATES = (
    torch.randn(NUM, 16, generator=torch.Generator().manual_seed(0))
    * torch.logspace(-3, 3, NUM)[:, None]
)


def test_noise_is_uniform_up_to_a_share_of_each_state_s_own_rms():
    share = (noisy(STATES, 0.3, (1, 2)) - STATES) / STATES.square().mean(1, keepdim=True).sqrt()
    assert 0.295 < share.abs().max() <= 0.3001
    assert share.mean().abs() < 0.01 and share.std() == pytest.approx(0.6 / 12**0.5, rel=0.02)


@given(edges=st.lists(st.integers(0, NUM), max_size=4))
def test_however_the_states_are_shared_out_each_gets_the_same_noise(edges):
    edges = [0, *sorted(edges), NUM]
    parts = [noisy(STATES[start:stop], 0.1, (5,), start) for start, stop in pairwise(edges)]
    assert torch.equal(torch.cat(parts), noisy(STATES, 0.1, (5,)))


def test_every_step_and_seed_has_noise_of_its_own_and_none_is_none():
    assert not torch.equal(noisy(STATES, 0.1, (5, 0)), noisy(STATES, 0.1, (5, 1)))
    assert noisy(STATES, 0.0, (5,)) is STATES
    assert noisy(STATES.bfloat16(), 0.1, (5,)).dtype == torch.bfloat16


def test_epochs_read_the_same_states_with_other_noise_and_their_labels_and_teachers_without(
    make_spec,
):
    spec = make_spec(noise=0.1, soft_labels=0.5, batch_tokens=10_000)
    plain = make_spec(soft_labels=0.5, batch_tokens=10_000)
    first, second = (batch for (batch,) in trainer_of(spec).learner.steps(0))
    clean, clean_second = (batch for (batch,) in trainer_of(plain).learner.steps(0))
    shares = [
        (read.hidden_ND - states.hidden_ND) / states.hidden_ND.square().mean(1, keepdim=True).sqrt()
        for read, states in ((first, clean), (second, clean_second))
    ]
    assert 0.05 < shares[0].abs().max() <= 0.1001
    assert (
        shares[0] - shares[1]
    ).abs().max() > 0.05  # another draw, not the same one for states in another order
    for name in ("next_N", "labels_KN", "teacher_MD", "teacher_KN"):
        assert torch.equal(getattr(first, name), getattr(clean, name)), name


def test_noise_below_zero_is_refused():
    with pytest.raises(ValueError, match="noise"):
        TrainConfig(noise=-0.1)
