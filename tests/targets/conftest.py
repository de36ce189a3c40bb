"""Two tiny targets on disk: a random one, and one whose answers are known."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig

from pipeline.targets.spec import TargetSpec
from tests.tiny_models import save_word_tokenizer, tiny_llama

VOCAB_SIZE = 512
CONTEXT = 128
EOS = (2, 5, 77, 130, 201, 333, 404, 480)  # many, so that random text ends
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
    "dtype": "float32",
}


def save_target(model, directory, eos):
    ends = {"bos_token_id": 1, "eos_token_id": list(eos), "pad_token_id": 0}
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(directory)
    # a tokenizer's own end is not in the set: no engine may stop at it
    save_word_tokenizer(directory, VOCAB_SIZE, eos_token="w3", bos_token="w1")
    return TargetSpec(str(directory))


@pytest.fixture(scope="session")
def random_target(tmp_path_factory):
    """A Llama with grouped queries and random weights, wide enough for distinct greedy choices."""
    model = tiny_llama(**SHAPE, initializer_range=0.2)
    return save_target(model, tmp_path_factory.mktemp("random"), EOS)


@pytest.fixture(scope="session")
def counting_target(tmp_path_factory):
    """A Llama that answers t with t + 1 (modulo the vocabulary) and ends at 2: its layers add
    nothing to the embedding, and row t + 1 of its lm_head is the embedding of t."""
    model = tiny_llama(**SHAPE, num_hidden_layers=1)
    embedding = torch.randn(VOCAB_SIZE, 128)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(embedding.roll(1, dims=0))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
    return save_target(model, tmp_path_factory.mktemp("counting"), (2,))


@pytest.fixture(scope="session")
def prompts():
    """Ragged prompts, from one token to most of the context."""
    generator = torch.Generator().manual_seed(1)
    lengths = (1, 3, 90, 17, 40, 8, 64, 25, 5, 33, 12, 71)
    return [torch.randint(0, 512, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture
def copied(random_target, tmp_path):
    return Path(shutil.copytree(random_target.model, tmp_path / "target"))


def edit(path, **changes):
    """Change keys of a JSON file; None removes a key."""
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def without(directory, name):
    """Remove a tensor from a target's weights."""
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
