"""Tiny random targets in float64, and heads for them that are often right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.decoder import Decoder
from pipeline.decoding.steps import last_positions
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape

SIZE, VOCAB, CONTEXT = 48, 24, 96
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
PROMPTS = [PROMPT, [2], [5, 6] * 20, PROMPT[::-1], PROMPT * 2]
CHAIN = ((0,), (0, 0), (0, 0, 0))
SPARSE = ((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 1))
SHAPE = {
    "hidden_size": SIZE,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TIED = {"tie_word_embeddings": True}
MIXED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}  # first sees all
GEMMA = {"head_dim": 12, "query_pre_attn_scalar": 12, "attn_logit_softcapping": None}
GPT2 = {"n_embd": SIZE, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-eager": (LlamaForCausalLM, LlamaConfig, {"attn_implementation": "eager"}),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 5}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied-mixed-windows": (Qwen2ForCausalLM, Qwen2Config, MIXED | TIED),
    "qwen3-head-dim": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 20} | TIED),
    # Every other layer slides; logits are soft-capped.
    "gemma2-both-windows": (
        Gemma2ForCausalLM,
        Gemma2Config,
        GEMMA | {"sliding_window": 5, "tie_word_embeddings": False},
    ),
    "cohere-scaled": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "gpt2-positions": (GPT2LMHeadModel, GPT2Config, GPT2),
}


endless = partial(Decoder, eos_token_ids=())  # no token ends a text


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="session")
def target_of() -> Callable[[str], PreTrainedModel]:
    """The tiny target of a family, built once."""

    @cache
    def get(family: str) -> PreTrainedModel:
        torch.manual_seed(7)
        model_class, config_class, own = FAMILIES[family]
        shape = SHAPE
        if family == "gpt2-positions":
            names = ("vocab_size", "initializer_range", "bos_token_id", "eos_token_id")
            shape = {name: SHAPE[name] for name in names}
        model = model_class(config_class(**shape, **own)).to(torch.float64).eval()
        model.generation_config.pad_token_id = 0
        return model

    return get


@pytest.fixture(scope="session")
def continuation() -> Callable[..., list[int]]:
    """Return a function of (model, prompt, num_tokens, eos): transformers' greedy text."""

    @cache
    def decode(model, prompt: tuple[int, ...], num_tokens: int, eos: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([prompt])
        model.generation_config.eos_token_id = None
        settings = {"do_sample": False, "eos_token_id": list(eos) or None}
        mask = torch.ones_like(ids)
        written = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, **settings)
        return written[0, len(prompt) :].tolist()

    def get(model, prompt, num_tokens: int, eos=()) -> list[int]:
        return list(decode(model, tuple(prompt), num_tokens, tuple(eos)))

    return get


@torch.no_grad()
def _fitted_heads(model, ids: list[int], num_heads: int, known: float = 1.0) -> MedusaHeads:
    hidden_TD, _ = last_positions(model, ids, len(ids))
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, num_heads), dtype=torch.float64)
    generator = seeded(3)
    for k in range(num_heads):
        hidden, labels = hidden_TD[: len(ids) - 2 - k], torch.tensor(ids[2 + k :])
        kept = torch.rand(len(labels), generator=generator) <= known
        one_hot = torch.nn.functional.one_hot(labels, VOCAB).double()
        heads.lm_head[k] = torch.linalg.lstsq(hidden[kept], one_hot[kept]).solution.T
    noise = torch.randn(heads.lm_head.shape, generator=generator)
    heads.lm_head += 1e-3 * noise  # no two guesses exactly as good
    return heads


@pytest.fixture(scope="session")
def fitted_heads() -> Callable[..., MedusaHeads]:
    """Return a function that fits heads to a share `known` of a text's positions."""
    return _fitted_heads


@pytest.fixture(scope="session")
def pair(target_of, continuation) -> Callable[[str], tuple[PreTrainedModel, MedusaHeads]]:
    """Return a function of a family: a target, and three heads fitted to its answer to `PROMPT`."""

    def get(family: str) -> tuple[PreTrainedModel, MedusaHeads]:
        model = target_of(family)
        return model, _fitted_heads(model, PROMPT + continuation(model, PROMPT, 40), 3, known=0.7)

    return get


def held_out_answers(model, prompts, texts, num_heads: int) -> Iterator[tuple[tuple, torch.Tensor]]:
    """Yield each answer's roots (states and next tokens) and labels [K, N]."""
    for prompt, text in zip(prompts, texts, strict=True):
        hidden_ND, _ = last_positions(model, prompt + text[:-1], len(text))
        labels_KN = torch.full((num_heads, len(text) - 1), IGNORED)
        for k in range(num_heads):
            labels_KN[k, : len(text) - 1 - k] = torch.tensor(text[1 + k :])
        yield (hidden_ND[:-1], torch.tensor(text[:-1])), labels_KN
