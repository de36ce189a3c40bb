"""Heads that attend to the text in native decoding, against teacher forcing over the whole text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import cartesian_tree
from pipeline.errors import ConfigError
from pipeline.heads.eagle3 import Eagle3Heads
from pipeline.heads.rows import Rows
from pipeline.heads.shapes import Eagle3Shape
from pipeline.targets.loading import layer_outputs

SIZE, VOCAB, STEPS, LENGTH = 32, 4, 3, 60
PROMPTS = ([1, 2, 3, 1, 0], [3, 0, 2], [1])
SHAPE = Eagle3Shape(
    SIZE,
    VOCAB,
    STEPS,
    layers=(1, 3),
    intermediate_size=24,
    attention_heads=4,
    key_value_heads=2,
    head_size=8,
)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A random target whose text does not repeat itself."""
    config = LlamaConfig(
        hidden_size=SIZE,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCAB,
        max_position_embeddings=256,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    return model


@pytest.fixture(scope="module")
def heads() -> Eagle3Heads:
    heads = Eagle3Heads(SHAPE)
    generator = torch.Generator().manual_seed(4)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 3
    return heads.requires_grad_(False)


def teacher_forced(model, heads, prompt: list[int], text: list[int]) -> torch.Tensor:
    """Whether guess k at each position of the text is right, bool [K, N], from one forward."""
    ids = prompt + text
    with torch.no_grad(), layer_outputs(model, SHAPE.layers) as seen:
        model(torch.tensor([ids]))
    following = torch.tensor(ids[1:])
    learned = torch.arange(len(prompt) - 1, len(ids) - 2)
    labels = torch.full((SHAPE.max_depth, len(learned)), IGNORED)
    for place, position in enumerate(learned.tolist()):
        later = ids[position + 2 :][: SHAPE.max_depth]
        labels[: len(later), place] = torch.tensor(later)
    rows = Rows(seen[0][0, :-1], following, torch.zeros_like(following), learned)
    states = heads.states(torch.empty(len(learned), 0), following[learned], labels, rows)
    return (states @ heads.lm_head.mT).argmax(-1) == labels


def test_a_chain_accepts_what_teacher_forcing_predicts(model, heads):
    """Keys of accepted tokens come from the target's states, those of drafts from the path."""
    chain = cartesian_tree((1,) * STEPS)
    longest = 0
    for prompt in PROMPTS:
        decoded = Decoder(model, heads, chain, eos_token_ids=()).generate(prompt, LENGTH)
        is_right = teacher_forced(model, heads, prompt, decoded.token_ids)
        place, expected = 0, []
        while place < is_right.shape[1]:
            run = int(is_right[:STEPS, place].int().cumprod(0).sum())
            run = min(run, is_right.shape[1] - place - 1)
            expected.append(run + 1)
            place += run + 1
        assert decoded.accepted == expected
        longest = max(longest, *expected)
    assert longest == STEPS + 1


@pytest.mark.parametrize("tree", [cartesian_tree((3, 2, 2)), DynamicTree(8, STEPS, 3)])
def test_text_is_greedy_and_batches_change_nothing(model, heads, tree):
    plain = plain_decoder(model, eos_token_ids=()).generate_batch(PROMPTS, LENGTH)
    decoder = Decoder(model, heads, tree, eos_token_ids=())
    batch = decoder.generate_batch(PROMPTS, LENGTH)
    assert [one.token_ids for one in batch] == [one.token_ids for one in plain]
    for prompt, one in zip(PROMPTS, batch, strict=True):
        assert decoder.generate(prompt, LENGTH).accepted == one.accepted
    assert sum(one.num_steps for one in batch) < sum(one.num_steps for one in plain)


def test_texts_that_end_leave_the_batch(model, heads):
    """The cache of the others moves to the front, and they accept what they accept alone."""
    decoder = Decoder(model, heads, cartesian_tree((2, 2)), eos_token_ids={3})
    alone = [decoder.generate(prompt, LENGTH) for prompt in PROMPTS]
    together = decoder.generate_batch(PROMPTS, LENGTH)
    assert [one.accepted for one in together] == [one.accepted for one in alone]
    assert len({one.num_steps for one in alone}) > 1


def test_heads_that_read_a_layer_too_many_are_refused(model):
    deeper = Eagle3Heads(replace(SHAPE, layers=(1, 5)))
    with pytest.raises(ConfigError, match="4 layers"):
        Decoder(model, deeper, cartesian_tree((1,)), eos_token_ids=())


def test_a_failed_allocation_leaves_no_cache_that_is_too_small(model, heads, monkeypatch):
    decoder = Decoder(model, heads, cartesian_tree((2, 2)), eos_token_ids=())
    decoder.generate(PROMPTS[0], 5)

    def fails(self, num_texts, num_slots):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Eagle3Heads, "open_cache", fails)
        with pytest.raises(torch.OutOfMemoryError):
            decoder.generate_batch(PROMPTS, 5)
    again = decoder.generate_batch(PROMPTS[:2], LENGTH)
    fresh = Decoder(model, heads, cartesian_tree((2, 2)), eos_token_ids=())
    alone = [fresh.generate(prompt, LENGTH) for prompt in PROMPTS[:2]]
    assert [one.token_ids for one in again] == [one.token_ids for one in alone]
