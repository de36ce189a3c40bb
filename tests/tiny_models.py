"""One factory of tiny models, and a tokenizer for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

# of most families
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """A Llama of `SIZES` with random weights, the same each time."""
    return tiny_model(LlamaConfig(**{**SIZES, **changes}))


def tiny_model(config: PretrainedConfig) -> Any:
    """A model in eval mode with random weights, the same each time."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def save_word_tokenizer(directory: Path, vocab_size: int, **special_tokens: str) -> None:
    """A tokenizer whose tokens are w0, w1, …"""
    vocabulary = {f"w{index}": index for index in range(vocab_size)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, **special_tokens).save_pretrained(directory)
