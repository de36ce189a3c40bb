"""Logits read from vLLM, in a module of its own: a process holds one engine at a time."""

from __future__ import annotations

import pytest
import torch

from pipeline.targets.loading import load_causal_lm
from pipeline.targets.vllm_engine import VLLMGenerationEngine
from pipeline.targets.vllm_logits import LOGITS, LogitRequest, read_logits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("vllm_here")]


def test_logits_are_those_of_the_transformers_model(random_target, prompts):
    engine = VLLMGenerationEngine(random_target, LOGITS)
    asked = [LogitRequest(prompts[0], num_tokens=3, num_top=4)]
    asked.append(LogitRequest(prompts[1], token_ids=[7, 8]))
    try:
        found = [read_logits(engine._running.llm, [request])[0] for request in asked]
    finally:
        engine.close()
    model = load_causal_lm(random_target, "cpu", 1)
    for request, answer in zip(asked, found, strict=True):
        ids = torch.tensor([request.prompt_ids + answer.token_ids[:-1]])
        with torch.inference_mode():
            logits_TV = model(ids).logits[0, -request.num_tokens :]
        assert answer.token_ids == logits_TV.argmax(-1).tolist()
        for place, logits_V in zip(answer.logits, logits_TV, strict=True):
            expected = logits_V[list(place)].tolist()
            assert list(place.values()) == pytest.approx(expected, abs=1e-4)
    assert [len(place) for place in found[0].logits] == [4, 4, 4]
    assert found[1].logits[0].keys() >= {7, 8}
