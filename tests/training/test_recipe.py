"""The rule that chooses what `train` leaves `auto`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import TrainConfig
from pipeline.heads.kind import Heads
from pipeline.heads.kinds import KINDS
from pipeline.training.heads_only import HeadsLearner
from pipeline.training.recipe import (
    FEW_STEPS,
    MAX_EPOCHS,
    MIN_BATCH,
    Recipe,
    make_recipe,
    packed_length,
    too_few_steps,
)

AUTO = TrainConfig()
POSITIONS, WIDTHS = st.integers(1, 10**9), st.sampled_from([64, 256, 1024, 4096, 8192])


def test_the_papers_data_and_width_give_the_papers_settings():
    """Appendix B: 100,000 conversations of 800 tokens, of a 7B target; for Medusa-2 packed into
    39,000 sequences of 2,048.
    """
    heads = make_recipe(AUTO, 80_000_000, 4096, Heads)
    assert (heads.epochs, heads.batch_tokens, heads.warmup_steps) == (2, 16_384, 40)
    assert heads.lr == pytest.approx(1e-3) and heads.total_steps == 2 * -(-80_000_000 // 16_384)
    both = make_recipe(AUTO, 80_000_000, 4096, Heads, sequences=39_000)
    assert (both.epochs, both.batch_sequences, both.warmup_steps) == (2, 128, 40)


def test_recurrent_heads_take_four_times_as_many_steps():
    medusa, recurrent = (
        HeadsLearner.expected_recipe(AUTO, 200_000, 256, KINDS[name])
        for name in ("medusa", "recurrent")
    )
    assert recurrent.total_steps == pytest.approx(4 * medusa.total_steps, rel=0.05)
    few = HeadsLearner.expected_recipe(AUTO, 100, 256, KINDS["recurrent"])
    assert few.batch_tokens == 32


@pytest.mark.parametrize("kind", KINDS.values())
@pytest.mark.parametrize("tokens", [20_000, 60_000, 400_000, 3_000_000])
def test_medusa_2_takes_about_as_many_steps_as_heads_alone(tokens, kind):
    """Half of the tokens are prompts. From 256 tokens a sequence on."""
    positions = tokens // 2
    sequences = -(-tokens // packed_length(AUTO, positions, tokens, kind))
    heads = make_recipe(AUTO, positions, 256, kind)
    both = make_recipe(AUTO, positions, 256, kind, sequences=sequences)
    assert both.epochs == min(4, heads.epochs)
    assert 0.5 <= both.total_steps / heads.total_steps <= 2 or tokens / sequences <= 256


@given(POSITIONS, st.integers(1, 10**6))
def test_batches_of_whole_rows_have_a_row_each(positions, rows):
    rows = min(rows, positions)
    usual, found = (make_recipe(AUTO, positions, 256, Heads, rows=each) for each in (None, rows))
    assert found.steps_per_epoch <= rows
    if usual.steps_per_epoch <= rows:
        assert found == usual
    else:
        assert found.batch_tokens == -(-positions // rows)


def test_the_second_stage_has_a_quarter_of_the_learning_rate():
    two_stages = {"recipe": "two-stage"}
    for lr, expected in (("auto", 1e-3 / 4), (0.5, 0.5)):
        settings = TrainConfig(lr=lr, backbone=two_stages)
        second = make_recipe(settings, 10**6, 4096, Heads, sequences=500)
        assert second.lr == pytest.approx(expected)
    assert make_recipe(TrainConfig(backbone=two_stages), 10**6, 4096, Heads).lr == 1e-3


@given(tokens=POSITIONS, packed=st.integers(1, 3000), length=st.integers(8, 3000))
def test_sequences_are_packed_within_their_bounds(tokens, packed, length):
    given_both = {"packed_tokens": packed, "sequence_length": length}
    settings = TrainConfig(backbone=given_both)
    assert packed_length(settings, tokens, tokens, Heads) == min(packed, length)
    shorter = TrainConfig(backbone={"sequence_length": length})
    chosen = packed_length(shorter, tokens, tokens, Heads)
    assert min(256, length) <= chosen <= length


@given(POSITIONS, POSITIONS, WIDTHS)
def test_the_rule_keeps_its_bounds_and_grows_with_the_data(one, other, width):
    few, many = (make_recipe(AUTO, positions, width, Heads) for positions in sorted((one, other)))
    assert few.batch_tokens <= many.batch_tokens and few.epochs >= many.epochs
    assert 2 <= few.epochs <= MAX_EPOCHS and MIN_BATCH <= few.batch_tokens <= 16_384
    assert 0 <= few.warmup_steps <= min(40, few.total_steps // 10)
    assert few.steps_per_epoch == -(-min(one, other) // few.batch_tokens)


def test_explicit_settings_are_the_recipe_for_any_data():
    found = make_recipe(
        TrainConfig(epochs=3, lr=0.5, batch_tokens=100, warmup_steps=0), 1001, 77, Heads
    )
    assert (found.epochs, found.lr, found.batch_tokens, found.warmup_steps) == (3, 0.5, 100, 0)
    assert found.steps_per_epoch == 11


@given(steps=st.integers(1, 300), epochs=st.integers(1, 12), share=st.floats(1e-6, 3))
def test_evaluations_are_even_few_and_cheap(steps, epochs, share):
    recipe = Recipe(epochs, 1e-3, 0, steps, batch_tokens=10)
    places = [step for step in range(1, steps + 1) if recipe.evaluates_after(step, share)]
    assert places[-1] == steps and len(places) <= -(-10 // epochs)
    assert len(places) == 1 or (len(places) - 1) * share <= 0.2


@pytest.mark.parametrize(("steps", "warned"), [(FEW_STEPS - 1, True), (FEW_STEPS, False)])
def test_too_few_steps_of_any_phase_are_warned_of(steps, warned):
    settings = TrainConfig(epochs=1, batch_tokens=128)
    said = too_few_steps([make_recipe(settings, 128 * many, 64, Heads) for many in (steps, 1000)])
    assert (said is not None) == warned
