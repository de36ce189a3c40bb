"""Two tiny targets on disk: one of random weights, and one that counts, whose every answer is known
beforehand.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pipeline.targets.spec import TargetSpec

VOCAB_SIZE = 512
CONTEXT = 128
EOS = (2, 5, 77, 130, 201, 333, 404, 480)  # many, so that random text ends


def _save(model: LlamaForCausalLM, directory: Path, eos: tuple[int, ...]) -> TargetSpec:
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=list(eos), pad_token_id=0
    )
    model.save_pretrained(directory)
    words = Tokenizer(
        WordLevel({f"w{index}": index for index in range(VOCAB_SIZE)}, unk_token="w0")
    )
    # a tokenizer's own end is not in the set: no engine may stop at it
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3", bos_token="w1").save_pretrained(
        directory
    )
    return TargetSpec(str(directory))


def _config(**changes: object) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "max_position_embeddings": CONTEXT,
            "eos_token_id": 2,
            "bos_token_id": 1,
            "dtype": "float32",
            **changes,
        }
    )


@pytest.fixture(scope="session")
def random_target(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    """A Llama with grouped queries and random weights, wide enough that its greedy choices are no
    ties.
    """
    torch.manual_seed(0)
    return _save(
        LlamaForCausalLM(_config(initializer_range=0.2)), tmp_path_factory.mktemp("random"), EOS
    )


@pytest.fixture(scope="session")
def counting_target(tmp_path_factory: pytest.TempPathFactory) -> TargetSpec:
    """A Llama that answers t with t + 1 (modulo the vocabulary) and ends at 2: its layers add
    nothing to the embedding, and row t + 1 of its lm_head is the embedding of t."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(_config(num_hidden_layers=1))
    embedding = torch.randn(VOCAB_SIZE, 128)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(embedding.roll(1, dims=0))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    return _save(model, tmp_path_factory.mktemp("counting"), (2,))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Ragged prompts, from one token to most of the context."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 3, 90, 17, 40, 8, 64, 25, 5, 33, 12, 71)
    return [
        torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths
    ]
