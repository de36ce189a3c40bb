from __future__ import annotations

from copy import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import EnvironmentFault
from pipeline.targets import transformers_engines
from pipeline.targets.loading import lm_head_weight
from pipeline.targets.transformers_engines import TransformersFeatureEngine


@pytest.fixture(scope="module")
def engine(random_target):
    return TransformersFeatureEngine(random_target, tokens_per_batch=200)


def states_of(engine, rows):
    """Return each row's states, in the order of the rows."""
    found = {index: states_TD.clone() for index, states_TD in engine.stream(rows)}
    assert sorted(found) == list(range(len(rows)))
    return [found[index] for index in range(len(rows))]


def test_batched_states_equal_unbatched_ones_and_give_the_logits(engine, prompts):
    for ids, states_TD in zip(prompts, states_of(engine, prompts), strict=True):
        ids_1T = torch.tensor([ids])
        alone_TD = engine.model.base_model(input_ids=ids_1T).last_hidden_state[0]
        assert states_TD.shape == (len(ids), engine.hidden_size) and states_TD.dtype == engine.dtype
        torch.testing.assert_close(states_TD, alone_TD, rtol=1e-4, atol=1e-5)
        logits_TV = engine.model(input_ids=ids_1T).logits[0]
        found_TV = states_TD @ lm_head_weight(engine.model).T
        torch.testing.assert_close(found_TV, logits_TV, rtol=1e-4, atol=1e-4)


def test_states_of_layers_are_the_hidden_states_of_transformers(random_target, prompts):
    engine = TransformersFeatureEngine(random_target, tokens_per_batch=200, layers=(1, 2))
    norm = engine.model.base_model.norm
    for ids, states_TX in zip(prompts, states_of(engine, prompts), strict=True):
        _, first_TD, last_TD = engine.model(
            input_ids=torch.tensor([ids]), output_hidden_states=True
        ).hidden_states
        found_TD, before_norm_TD = states_TX.chunk(2, -1)
        torch.testing.assert_close(found_TD, first_TD[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(norm(before_norm_TD), last_TD[0], rtol=1e-4, atol=1e-4)


def test_an_engine_verifies_its_tap(random_target, monkeypatch):
    verified = []
    monkeypatch.setattr(transformers_engines, "verify_tap", verified.append)
    assert verified == [TransformersFeatureEngine(random_target).model]


def test_a_window_holds_at_most_so_many_bytes_of_states(engine, monkeypatch):
    num_bytes = 400 * engine.hidden_size * engine.dtype.itemsize
    monkeypatch.setattr(transformers_engines, "WINDOW_BYTES", num_bytes)
    rows = iter([[7] * 50] * 200)
    next(engine.stream(rows))
    assert 200 - len(list(rows)) == 400 / 50 + 1, "and one row of the next window"


def test_states_of_layers_fill_a_window_as_many_times_faster(engine, monkeypatch):
    several = copy(engine)
    several.layers = (1, 2)
    num_bytes = 400 * engine.hidden_size * engine.dtype.itemsize
    monkeypatch.setattr(transformers_engines, "WINDOW_BYTES", num_bytes)
    rows = iter([[7] * 50] * 200)
    next(several.stream(rows))
    assert 200 - len(list(rows)) == 200 / 50 + 1


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), max_size=80), budget=st.integers(1, 100))
def test_every_row_is_in_one_batch_within_the_budget(engine, lengths, budget):
    small = copy(engine)
    small.tokens_per_batch = budget
    seen = []
    for indices, rows in small._feature_batches([0] * length for length in lengths):
        assert [len(ids) for ids in rows] == [lengths[index] for index in indices]
        assert len(rows) == 1 or len(rows) * max(map(len, rows)) <= budget
        seen += indices
    assert sorted(seen) == list(range(len(lengths)))


def test_a_batch_that_exceeds_the_gpu_is_an_environment_fault(engine, monkeypatch):
    def small_gpu(*_):
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(engine, "_forward", small_gpu)
    with pytest.raises(EnvironmentFault, match="tokens_per_batch"):
        list(engine.stream([[1]]))
