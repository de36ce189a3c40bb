from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopPLogitsWarper

from pipeline.conversations.requests import Completion, Request
from pipeline.errors import EnvironmentFault
from pipeline.targets.spec import TargetSpec
from pipeline.targets.transformers_engines import (
    TransformersGenerationEngine,
    sample_tokens,
    truncated_probabilities,
)
from tests.targets.conftest import CONTEXT, EOS


@pytest.fixture(scope="module")
def engine(random_target: TargetSpec) -> TransformersGenerationEngine:
    return TransformersGenerationEngine(random_target)


def run(engine: TransformersGenerationEngine, requests: list[Request]) -> dict[str, Completion]:
    for request in requests:
        engine.add(request)
    completions = {}
    while engine._ids:
        completions |= {completion.id: completion for completion in engine.step()}
    return completions


def greedy(prompts: list[list[int]], num_tokens: int = 24) -> list[Request]:
    return [Request(str(row), ids, num_tokens) for row, ids in enumerate(prompts)]


def sampled(prompts: list[list[int]]) -> list[Request]:
    return [
        Request(str(row), ids, 24, seed=row, temperature=0.5 + row / 10, top_p=1 - row / 30)
        for row, ids in enumerate(prompts)
    ]


def test_greedy_text_is_that_of_transformers_own_generate(
    engine: TransformersGenerationEngine, prompts: list[list[int]]
) -> None:
    completions = run(engine, greedy(prompts))
    for row, ids in enumerate(prompts):
        expected = engine.model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[
            0, len(ids) :
        ]
        assert completions[str(row)].token_ids == expected.tolist()


def test_a_sampled_text_does_not_depend_on_its_batch(
    engine: TransformersGenerationEngine, prompts: list[list[int]]
) -> None:
    requests = sampled(prompts)
    together = run(engine, requests)
    assert together == run(engine, requests[::-1])
    for request in requests:
        assert run(engine, [request]) == {request.id: together[request.id]}
    assert {completion.finished for completion in together.values()} == {"stop", "length"}


def test_a_request_that_joins_a_running_batch_reads_as_if_alone(
    engine: TransformersGenerationEngine, prompts: list[list[int]]
) -> None:
    requests = sampled(prompts)
    expected = run(engine, requests)
    waiting, completions = list(requests), {}
    while waiting or engine._ids:
        if waiting:
            engine.add(waiting.pop())
        completions |= {completion.id: completion for completion in engine.step()}
    assert completions == expected


def test_a_stop_token_ends_a_text_and_is_its_last_id(
    engine: TransformersGenerationEngine, prompts: list[list[int]]
) -> None:
    for completion in run(engine, sampled(prompts)).values():
        stops = [token in EOS for token in completion.token_ids]
        assert stops[-1] == (completion.finished == "stop")
        assert not any(stops[:-1])
        assert completion.finished == "stop" or len(completion.token_ids) == 24


def test_a_requests_own_stop_tokens_end_it(counting_target: TargetSpec) -> None:
    engine = TransformersGenerationEngine(counting_target)
    requests = [
        Request("own", [100], 50, stop_token_ids=(110,)),
        Request("eos", [500], 50),
        Request("none", [100], 3),
    ]
    assert run(engine, requests) == {
        "own": Completion("own", list(range(101, 111)), "stop"),
        "eos": Completion("eos", [*range(501, 512), 0, 1, 2], "stop"),
        "none": Completion("none", [101, 102, 103], "length"),
    }


def test_a_text_ends_with_the_context(counting_target: TargetSpec) -> None:
    engine = TransformersGenerationEngine(counting_target)
    completion = run(engine, [Request("long", [7] * (CONTEXT - 4), 50)])["long"]
    assert completion == Completion("long", [8, 9, 10, 11], "length")
    short = TransformersGenerationEngine(dataclasses.replace(counting_target, max_tokens=20))
    assert len(run(short, [Request("short", [7] * 15, 50)])["short"].token_ids) == 5


def test_a_prompt_without_room_or_a_running_id_is_an_error(counting_target: TargetSpec) -> None:
    engine = TransformersGenerationEngine(counting_target)
    engine.add(Request("a", [1], 2))
    for id, ids in (("empty", []), ("long", [1] * CONTEXT), ("a", [1])):
        with pytest.raises(ValueError, match=id):
            engine.add(Request(id, ids, 5))


def test_the_cache_stays_within_its_budget(
    random_target: TargetSpec, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersGenerationEngine(random_target, max_batch_tokens=300)
    expected = run(engine, sampled(prompts))
    sizes = []
    decode = engine._decode
    monkeypatch.setattr(
        engine, "_decode", lambda: (sizes.append(tuple(engine._mask_BT.shape)), decode())[1]
    )
    assert run(engine, sampled(prompts)) == expected
    assert max(rows * width for rows, width in sizes) <= 300
    assert max(rows for rows, _ in sizes) > 1


def test_an_overfull_gpu_halves_the_budget_and_loses_nothing(
    random_target: TargetSpec, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersGenerationEngine(random_target)
    expected = run(engine, sampled(prompts))
    forward = engine._forward

    def small_gpu(ids_BT: torch.Tensor, mask_BT: torch.Tensor, cache: object) -> torch.Tensor:
        if mask_BT.numel() > 200:
            raise torch.cuda.OutOfMemoryError
        return forward(ids_BT, mask_BT, cache)

    monkeypatch.setattr(engine, "_forward", small_gpu)
    assert run(engine, sampled(prompts)) == expected
    engine.add(Request("huge", [1] * 100, 20))
    monkeypatch.setattr(
        engine, "_forward", lambda *_: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError)
    )
    with pytest.raises(EnvironmentFault, match="One conversation"):
        engine.step()


# --- the draw


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0.1, 2.0),
    top_p=st.sampled_from([0.05, 0.3, 0.9, 0.999, 1.0]),
    seed=st.integers(0, 99),
)
def test_truncation_is_that_of_transformers_warpers(
    temperature: float, top_p: float, seed: int
) -> None:
    logits_BV = torch.randn(3, 50, generator=torch.Generator().manual_seed(seed)) * 3
    warped_BV = TemperatureLogitsWarper(temperature)(None, logits_BV)
    warped_BV = TopPLogitsWarper(top_p)(None, warped_BV)
    settings_ = Request("a", [1], 1, temperature=temperature, top_p=top_p)
    actual_BV = truncated_probabilities(logits_BV, [settings_] * 3)
    actual_BV = actual_BV / actual_BV.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(actual_BV, warped_BV.softmax(dim=-1), rtol=1e-4, atol=1e-5)


def test_draws_are_distributed_as_the_probabilities() -> None:
    logits_V = torch.tensor([0.5, 0.2, 0.2, 0.1]).log()
    num_draws = 20_000
    request = Request("a", [1], 1, seed=0, temperature=1.0)
    generator = torch.Generator().manual_seed(0)
    draws = sample_tokens(
        logits_V.expand(num_draws, 4), [request] * num_draws, [generator] * num_draws
    )
    frequencies = draws.bincount(minlength=4) / num_draws
    # five standard deviations of a frequency
    torch.testing.assert_close(
        frequencies, logits_V.exp(), rtol=0, atol=5 * (0.25 / num_draws) ** 0.5
    )


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits_BV = torch.tensor([[0.0, 1.0, 0.9], [0.0, 1.0, 0.9], [3.0, 1.0, 0.9]])
    requests = [Request("a", [1], 1), Request("b", [1], 1, temperature=1.0), Request("c", [1], 1)]
    drawn = {
        tuple(
            sample_tokens(
                logits_BV, requests, [None, torch.Generator().manual_seed(seed), None]
            ).tolist()
        )
        for seed in range(40)
    }
    assert drawn == {(1, 0, 0), (1, 1, 0), (1, 2, 0)}
