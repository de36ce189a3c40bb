"""Targets of benchmarks with random weights: speed depends only on a model's shape."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from examples.demo_target.target import new_model, train_tokenizer
from pipeline.config import SeedSource
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.sources import SourceReader
from pipeline.targets.spec import TargetSpec

ROOT = Path(__file__).parent.parent
DEMO_TARGET = ROOT / "runs" / "demo-target"
SEEDS = ROOT / "data" / "seeds.sharegpt.jsonl"

# 54.5M parameters without embeddings and lm_head.
BACKBONE = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}
TINY = BACKBONE | {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}


def random_target(directory: Path, shape: dict[str, int], dtype: str = "float32") -> TargetSpec:
    """Write a Llama target of a shape with random weights, without tokenizer; return its spec."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=False)).to(
        getattr(torch, dtype)
    )
    return _saved(model, directory, dtype)


def random_demo_target(directory: Path) -> TargetSpec:
    """Write the demo target with random weights, tokenizer and chat template; return its spec."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(bundled_conversations())
    tokenizer.save_pretrained(directory)
    return _saved(new_model(tokenizer), directory)


def demo_target(directory: Path) -> TargetSpec:
    """Return the spec of the demo target if `make demo` has trained it, else of a random one."""
    trained = (DEMO_TARGET / "config.json").is_file()
    return TargetSpec(str(DEMO_TARGET)) if trained else random_demo_target(directory)


def bundled_conversations() -> list[Conversation]:
    """Return the seed conversations that are bundled with the project."""
    rows = SourceReader(SeedSource(path=SEEDS), SEEDS.stem)
    return [row for row in rows if isinstance(row, Conversation)]


def _saved(model: LlamaForCausalLM, directory: Path, dtype: str = "float32") -> TargetSpec:
    logging.disable_progress_bar()
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1)
    model.save_pretrained(directory)
    return TargetSpec(str(directory), dtype=dtype)
