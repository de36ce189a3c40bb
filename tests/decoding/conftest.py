"""Tiny random targets in float64, and heads for them that are often right."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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

from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape

SIZE, VOCAB, CONTEXT = 48, 24, 96
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
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
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "llama-eager": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="eager")),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
    "qwen2-tied-mixed-windows": lambda: (
        Qwen2ForCausalLM(  # the first layer sees all, the second slides
            Qwen2Config(
                **SHAPE,
                tie_word_embeddings=True,
                use_sliding_window=True,
                sliding_window=5,
                max_window_layers=1,
            )
        )
    ),
    "qwen3-head-dim": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SHAPE, head_dim=20, tie_word_embeddings=True)
    ),
    "gemma2-both-windows": lambda: (
        Gemma2ForCausalLM(  # every other layer slides; logits are soft-capped
            Gemma2Config(
                **SHAPE,
                head_dim=12,
                query_pre_attn_scalar=12,
                sliding_window=5,
                attn_logit_softcapping=None,
                tie_word_embeddings=False,
            )
        )
    ),
    "cohere-scaled": lambda: CohereForCausalLM(CohereConfig(**SHAPE, logit_scale=0.25)),
    "gpt2-positions": lambda: GPT2LMHeadModel(
        GPT2Config(
            n_embd=SIZE,
            n_layer=2,
            n_head=4,
            vocab_size=VOCAB,
            n_positions=CONTEXT,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=None,
        )
    ),
}


@pytest.fixture(scope="session")
def target_of() -> Callable[[str], PreTrainedModel]:
    """The tiny target of a family, built once."""
    made: dict[str, PreTrainedModel] = {}

    def get(family: str) -> PreTrainedModel:
        if family not in made:
            torch.manual_seed(7)
            made[family] = FAMILIES[family]().to(torch.float64).eval()
            made[family].generation_config.pad_token_id = 0
        return made[family]

    return get


@pytest.fixture(scope="session")
def continuation() -> Callable[..., list[int]]:
    """(model, prompt, num_tokens, eos): what transformers itself decodes greedily; each asked of it
    once.
    """

    @cache
    def decode(
        model: PreTrainedModel, prompt: tuple[int, ...], num_tokens: int, eos: tuple[int, ...]
    ) -> list[int]:
        ids = torch.tensor([prompt])
        model.generation_config.eos_token_id = None
        settings = {
            "do_sample": False,
            "max_new_tokens": num_tokens,
            "eos_token_id": list(eos) or None,
        }
        return model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[
            0, len(prompt) :
        ].tolist()

    return lambda model, prompt, num_tokens, eos=(): list(
        decode(model, tuple(prompt), num_tokens, tuple(eos))
    )


@torch.no_grad()
def _fitted_heads(
    model: PreTrainedModel, ids: list[int], num_heads: int, known: float = 1.0
) -> MedusaHeads:
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    model(input_ids=torch.tensor([ids]))
    hook.remove()
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, num_heads), dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    for k in range(num_heads):
        hidden, labels = seen[0][0, : len(ids) - 2 - k], torch.tensor(ids[2 + k :])
        kept = torch.rand(len(labels), generator=generator) <= known
        one_hot = torch.nn.functional.one_hot(labels, VOCAB).double()
        heads.lm_head[k] = torch.linalg.lstsq(hidden[kept], one_hot[kept]).solution.T
    heads.lm_head += 1e-3 * torch.randn(
        heads.lm_head.shape, generator=generator
    )  # no two guesses exactly as good
    return heads


@pytest.fixture(scope="session")
def fitted_heads() -> Callable[..., MedusaHeads]:
    """(model, ids, num_heads, known): heads that are right on a share of a text's positions, mostly
    wrong elsewhere.
    """
    return _fitted_heads


@pytest.fixture(scope="session")
def pair(target_of, continuation) -> Callable[[str], tuple[PreTrainedModel, MedusaHeads]]:
    """(family): a target, and three heads that know its answer to `PROMPT` well and others
    hardly.
    """

    def get(family: str) -> tuple[PreTrainedModel, MedusaHeads]:
        model = target_of(family)
        return model, _fitted_heads(model, PROMPT + continuation(model, PROMPT, 40), 3, known=0.7)

    return get
