from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from pipeline.conversations.requests import Completion, Request
from pipeline.errors import EnvironmentFault
from pipeline.targets.transformers_engines import (
    TransformersGenerationEngine,
    sample_tokens,
    truncated_probabilities,
)
from tests.targets.conftest import CONTEXT


@pytest.fixture(scope="module")
def engine(random_target):
    return TransformersGenerationEngine(random_target)


def run(engine, requests, *, one_per_step=False):
    """Return completions by request; add the requests at once, or one before each step."""
    waiting, texts = list(requests), {}
    num_added = 1 if one_per_step else len(waiting)
    while len(texts) < len(requests):
        for request in waiting[:num_added]:
            engine.add(request)
        del waiting[:num_added]
        texts |= {completion.id: completion for completion in engine.step()}
    return texts


@pytest.fixture(scope="module")
def sampled(prompts):
    """Requests of different temperatures; every fourth is greedy."""
    requests = []
    for row, ids in enumerate(prompts):
        temperature = 0.5 + row / 10 if row % 4 else 0.0
        request = Request(str(row), ids, 24, seed=row, temperature=temperature, top_p=1 - row / 30)
        requests.append(request)
    return requests


@pytest.fixture(scope="module")
def texts(engine, sampled):
    return run(engine, sampled)


def test_greedy_text_is_that_of_transformers(engine, prompts, texts):
    greedy = run(engine, [Request(str(row), ids, 24) for row, ids in enumerate(prompts)])
    for row, ids in enumerate(prompts):
        ids_1T = torch.tensor([ids])
        expected_1T = engine.model.generate(ids_1T, max_new_tokens=24, do_sample=False)
        assert greedy[str(row)].token_ids == expected_1T[0, len(ids) :].tolist()
        is_greedy = row % 4 == 0  # beside sampled rows
        assert (texts[str(row)] == greedy[str(row)]) == is_greedy


def test_a_sampled_text_does_not_depend_on_its_batch(engine, sampled, texts):
    assert run(engine, sampled[::-1]) == texts
    assert run(engine, sampled, one_per_step=True) == texts
    for request in sampled:
        assert run(engine, [request]) == {request.id: texts[request.id]}


def test_texts_end_at_stop_tokens_limits_and_the_context(counting_target):
    counting = TransformersGenerationEngine(counting_target)
    requests = [
        Request("own", [100], 50, stop_token_ids=(110,)),
        Request("eos", [500], 50),
        Request("limit", [100], 3),
        Request("context", [7] * (CONTEXT - 4), 50),
    ]
    assert run(counting, requests) == {
        "own": Completion("own", list(range(101, 111)), "stop"),
        "eos": Completion("eos", [*range(501, 512), 0, 1, 2], "stop"),
        "limit": Completion("limit", [101, 102, 103], "length"),
        "context": Completion("context", [8, 9, 10, 11], "length"),
    }


def test_the_cache_stays_within_its_budget(random_target, sampled, texts, monkeypatch):
    engine, sizes = TransformersGenerationEngine(random_target, max_batch_tokens=300), []
    decode = engine._decode

    def recording():
        sizes.append(engine._mask_BT.numel())
        return decode()

    monkeypatch.setattr(engine, "_decode", recording)
    assert run(engine, sampled) == texts
    assert 150 < max(sizes) <= 300


def test_a_batch_that_exceeds_the_gpu_is_an_environment_fault(random_target, monkeypatch):
    def small_gpu(*_):
        raise torch.cuda.OutOfMemoryError

    engine = TransformersGenerationEngine(random_target)
    monkeypatch.setattr(engine, "_forward", small_gpu)
    engine.add(Request("huge", [1] * 100, 20))
    with pytest.raises(EnvironmentFault, match="max_batch_tokens"):
        engine.step()


# --- sampling


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.1, 2.0),
    top_p=st.sampled_from([0.05, 0.3, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 99),
)
def test_truncation_is_that_of_transformers(temperature, top_p, seed):
    logits_BV = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed)) * 3
    warped_BV = TemperatureLogitsWarper(temperature)(None, logits_BV)
    expected_BV = TopPLogitsWarper(top_p)(None, warped_BV).softmax(dim=-1)
    requests = [Request("a", [1], 1, temperature=temperature, top_p=top_p)] * 3
    found_BV = truncated_probabilities(logits_BV, requests)
    found_BV = found_BV / found_BV.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(found_BV, expected_BV, rtol=1e-4, atol=1e-5)


def test_draws_are_distributed_as_the_probabilities():
    probabilities_V, num_draws = torch.tensor([0.5, 0.2, 0.2, 0.1]), 20_000
    logits_BV = probabilities_V.log().expand(num_draws, 4)
    requests = [Request("a", [1], 1, seed=0, temperature=1.0)] * num_draws
    draws = sample_tokens(logits_BV, requests, [torch.Generator().manual_seed(0)] * num_draws)
    frequencies_V = draws.bincount(minlength=4) / num_draws
    tolerance = 5 * (0.25 / num_draws) ** 0.5  # standard deviations of a frequency
    torch.testing.assert_close(frequencies_V, probabilities_V, rtol=0, atol=tolerance)
