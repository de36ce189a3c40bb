from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets import transformers_engines
from pipeline.targets.loading import lm_head_weight, load_causal_lm, verify_tap
from pipeline.targets.spec import TargetSpec
from pipeline.targets.transformers_engines import TransformersFeatureEngine


@pytest.fixture(scope="module")
def engine(random_target: TargetSpec) -> TransformersFeatureEngine:
    return TransformersFeatureEngine(random_target, tokens_per_batch=200)


def states_of(engine: TransformersFeatureEngine, rows: list[list[int]]) -> list[torch.Tensor]:
    """Each row's states, in the rows' order."""
    found = {index: states_TD.clone() for index, states_TD in engine.stream(rows)}
    assert sorted(found) == list(range(len(rows)))
    return [found[index] for index in range(len(rows))]


def test_batched_states_equal_unbatched_ones(
    engine: TransformersFeatureEngine, prompts: list[list[int]]
) -> None:
    for ids, states_TD in zip(prompts, states_of(engine, prompts), strict=True):
        alone_TD = engine.model.base_model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        assert states_TD.shape == (len(ids), engine.hidden_size) and states_TD.dtype == engine.dtype
        torch.testing.assert_close(states_TD, alone_TD, rtol=1e-4, atol=1e-5)


def test_lm_head_of_the_states_is_the_targets_logits(
    engine: TransformersFeatureEngine, prompts: list[list[int]]
) -> None:
    for ids, states_TD in zip(prompts, states_of(engine, prompts), strict=True):
        logits_TV = engine.model(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(
            states_TD @ lm_head_weight(engine.model).T, logits_TV, rtol=1e-4, atol=1e-4
        )


def test_an_engine_that_would_tap_the_wrong_state_does_not_start(
    random_target: TargetSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_causal_lm(random_target)
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    monkeypatch.setattr(transformers_engines, "load_causal_lm", lambda *_: model)
    with pytest.raises(ConfigError, match="not what its lm_head reads"):
        TransformersFeatureEngine(random_target)


def test_a_stream_reads_no_further_ahead_than_a_window(engine: TransformersFeatureEngine) -> None:
    read = []
    stream = engine.stream(read.append(row) or [row] * 50 for row in range(200))
    next(stream)
    assert len(read) <= 2 * 8 * 200 // 50 + 2  # the window that is out and the one under way


def test_a_window_holds_no_more_bytes_of_states_than_it_may(
    engine: TransformersFeatureEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        transformers_engines, "WINDOW_BYTES", 400 * engine.hidden_size * engine.dtype.itemsize
    )
    read = []
    next(engine.stream(read.append(row) or [row] * 50 for row in range(200)))
    assert len(read) <= 400 // 50 + 1


def test_an_empty_row_is_a_programmers_error(engine: TransformersFeatureEngine) -> None:
    with pytest.raises(ValueError, match="row 1 is empty"):
        list(engine.stream([[1], []]))


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), max_size=80), budget=st.integers(1, 100))
def test_every_row_is_in_one_batch_within_the_token_budget(
    engine: TransformersFeatureEngine, lengths: list[int], budget: int
) -> None:
    small = TransformersFeatureEngine(engine.model, tokens_per_batch=budget)
    seen = []
    for indices, rows in small._batches([0] * length for length in lengths):
        assert [len(ids) for ids in rows] == [lengths[index] for index in indices]
        assert len(rows) == 1 or len(rows) * max(map(len, rows)) <= budget
        seen += indices
    assert sorted(seen) == list(range(len(lengths)))


def test_a_batch_that_exceeds_the_gpu_is_halved(
    engine: TransformersFeatureEngine, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = TransformersFeatureEngine._forward

    def small_gpu(self: TransformersFeatureEngine, indices: list[int], rows: list[list[int]]):
        if len(rows) * max(map(len, rows)) > 100:
            raise torch.cuda.OutOfMemoryError
        return forward(self, indices, rows)

    monkeypatch.setattr(TransformersFeatureEngine, "_forward", small_gpu)
    small = TransformersFeatureEngine(engine.model, tokens_per_batch=10_000)
    for actual, expected in zip(states_of(small, prompts), states_of(engine, prompts), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert small.tokens_per_batch < 10_000
    with pytest.raises(EnvironmentFault, match="A row of 101 tokens"):
        list(small.stream([[1] * 101]))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_an_8_bit_target_gives_states_near_the_full_ones(
    random_target: TargetSpec, prompts: list[list[int]]
) -> None:
    full = states_of(TransformersFeatureEngine(random_target), prompts)
    quantized = TransformersFeatureEngine(dataclasses.replace(random_target, quantization="8bit"))
    for actual_TD, expected_TD in zip(states_of(quantized, prompts), full, strict=True):
        assert actual_TD.dtype == quantized.dtype
        assert (
            0 < relative_error(actual_TD, expected_TD) < 0.1
        )  # twice two layers of activations rounded to 1/127


def test_a_4_bit_target_gives_the_states_of_its_dequantized_weights(
    random_target: TargetSpec, prompts: list[list[int]]
) -> None:
    from bitsandbytes.functional import dequantize_4bit  # slow to import
    from bitsandbytes.nn import Linear4bit

    quantized = TransformersFeatureEngine(
        load_causal_lm(dataclasses.replace(random_target, quantization="4bit"))
    )
    full = TransformersFeatureEngine(random_target)
    assert torch.equal(lm_head_weight(quantized.model), lm_head_weight(full.model))
    num_replaced = 0
    for name, module in quantized.model.named_modules():
        if isinstance(
            module, Linear4bit
        ):  # before its first forward, which packs the weight for this processor
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            full.model.get_submodule(name).weight.copy_(weight)
            num_replaced += 1
    assert num_replaced == 2 * 7
    verify_tap(quantized.model)
    for actual_TD, expected_TD in zip(
        states_of(quantized, prompts), states_of(full, prompts), strict=True
    ):
        assert actual_TD.dtype == quantized.dtype == torch.float32
        # bitsandbytes' CPU kernel multiplies in bfloat16 (3e-3 a product); the full weights' states
        # are 0.6 away
        assert relative_error(actual_TD, expected_TD) < 0.1
