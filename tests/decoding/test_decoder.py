"""Decoding alone and in batches, in float64, where rounding cannot tell texts apart."""

from __future__ import annotations

import math

import pytest

from pipeline.decoding.acceptance import RejectionSampling, greedy_acceptance
from pipeline.decoding.decoder import Decoded, Decoder, acceleration_rate
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import cartesian_tree
from pipeline.errors import ConfigError
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.decoding.conftest import (
    CHAIN,
    CONTEXT,
    FAMILIES,
    PROMPT,
    PROMPTS,
    SPARSE,
    endless,
    seeded,
)
from tests.decoding.test_acceptance import RULES

TREES = {
    "plain": (),
    "sparse": SPARSE,
    "full": cartesian_tree((3, 2, 2)),
    "dynamic": DynamicTree(30, 3, 4),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_are_what_transformers_writes(family, pair, continuation):
    model, heads = pair(family)
    expected = [continuation(model, prompt, 24) for prompt in PROMPTS]
    decoder = endless(model, heads, SPARSE)
    plain = endless(model, None, ())
    together = decoder.generate_batch(PROMPTS, 24)
    assert [one.token_ids for one in together] == expected
    alone, text = decoder.generate(PROMPT, 40), continuation(model, PROMPT, 40)
    assert alone.token_ids == plain.generate(PROMPT, 40).token_ids == text
    assert {1, 3} <= set(alone.accepted), "guesses must be accepted and refused"
    for one, text in zip(plain.generate_batch(PROMPTS, 24), expected, strict=True):
        assert (one.token_ids, one.accepted) == (text, [1] * 23)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_batch_is_judged_as_each_text_is(rule, tree, pair):
    model, heads = pair("mistral-window")
    decoder = endless(model, heads, tree)
    together = decoder.generate_batch(PROMPTS, 16, rule, list(map(seeded, range(5))))
    for number, one in enumerate(together):
        alone = decoder.generate(PROMPTS[number], 16, rule, seeded(number))
        assert (one.token_ids, one.accepted) == (alone.token_ids, alone.accepted)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2-both-windows"])
def test_accepted_rows_are_moved_within_the_cache(family, target_of, continuation, fitted_heads):
    """Every head's best guess is wrong, so that accepted rows are never the first."""
    model = target_of(family)
    text = continuation(model, PROMPT, 40)
    heads = fitted_heads(model, PROMPT + text, 3)
    wrong = min(set(range(24)) - set(text))
    heads.lm_head.data[:, wrong] = 4 * heads.lm_head.data.sum(1)  # one-hot logits sum to about 1
    decoder = endless(model, heads, cartesian_tree((2, 2, 2)))
    decoded = decoder.generate(PROMPT, 40)
    assert (decoded.token_ids, decoded.accepted) == (text, [4] * 9 + [3])


@pytest.mark.parametrize("tree", [(), SPARSE], ids=["plain", "tree"])
def test_a_step_is_one_forward(tree, pair):
    model, heads = pair("llama")
    decoder = endless(model, heads, tree)
    rows = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    decoded = decoder.generate(PROMPT, 20, RejectionSampling(0.7), seeded(0))
    hook.remove()
    assert rows == [len(PROMPT)] + [1 + len(tree)] * decoded.num_steps
    assert sum(decoded.accepted) == len(decoded.token_ids) - 1


@pytest.mark.parametrize("rule", [greedy_acceptance, RejectionSampling(0.7)])
@pytest.mark.parametrize("position", [1, 4, 5, 6, 11])
def test_an_end_token_inside_a_path_ends_the_text(position, rule, target_of, fitted_heads):
    model = target_of("qwen3-head-dim")
    text = endless(model, None, ()).generate(PROMPT, 24, rule, seeded(3)).token_ids
    heads, ends = fitted_heads(model, PROMPT + text, 3), [text[position], 23]
    decoded = Decoder(model, heads, CHAIN, eos_token_ids=ends).generate(PROMPT, 24, rule, seeded(3))
    assert decoded.token_ids == text[: text.index(text[position]) + 1]
    assert decoded.finished == "stop"
    assert sum(decoded.accepted) == len(decoded.token_ids) - 1


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_length_cuts_inside_a_path(num_tokens, target_of, continuation, fitted_heads):
    """An end token after the limit does not count."""
    model = target_of("mistral-window")
    text = continuation(model, PROMPT, 40)
    heads = fitted_heads(model, PROMPT + text, 3)
    behind = {text[num_tokens]} - set(text[:num_tokens])
    decoded = Decoder(model, heads, CHAIN, eos_token_ids=behind).generate(PROMPT, num_tokens)
    assert (decoded.token_ids, decoded.finished) == (text[:num_tokens], "length")
    assert sum(decoded.accepted) == num_tokens - 1


def test_a_text_that_has_ended_leaves_the_batch(pair, continuation):
    model, heads = pair("qwen2")
    texts = [continuation(model, prompt, 24) for prompt in PROMPTS]
    ends = [texts[1][5], texts[3][9]]
    batches: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: batches.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    decoded = Decoder(model, heads, SPARSE, eos_token_ids=ends).generate_batch(PROMPTS, 24)
    hook.remove()
    expected = [continuation(model, prompt, 24, ends) for prompt in PROMPTS]
    assert [one.token_ids for one in decoded] == expected
    steps = batches[len(PROMPTS) :]
    assert sum(steps) == sum(one.num_steps for one in decoded) and len(set(steps)) > 2


def test_texts_end_at_the_context_of_a_position_table(pair, continuation):
    model, heads = pair("gpt2-positions")
    prompts = [PROMPT * 11, PROMPT * 5, [2] * (CONTEXT - 1)]
    decoder = endless(model, heads, SPARSE)
    alone = [decoder.generate(prompt, 30) for prompt in prompts]
    for prompt, one, same in zip(prompts, alone, decoder.generate_batch(prompts, 30), strict=True):
        text = continuation(model, prompt, min(30, CONTEXT - len(prompt)))
        assert one.token_ids == same.token_ids == text and one.finished == "length"


@pytest.mark.parametrize("granule", [1, 256])
def test_batches_follow_one_another_in_one_cache(granule, pair, continuation, monkeypatch):
    monkeypatch.setattr("pipeline.decoding.cache._GRANULE", granule)
    model, heads = pair("mistral-window")
    decoder = endless(model, heads, SPARSE)
    plain = endless(model, None, ())
    for prompts in (PROMPTS[1:2], PROMPTS[:2], PROMPTS[4:], PROMPTS, PROMPTS[:1]):
        texts = [continuation(model, prompt, 12) for prompt in prompts]
        for one in (decoder, plain):
            assert [each.token_ids for each in one.generate_batch(prompts, 12)] == texts
    longest = max(map(len, PROMPTS)) + 12 + 1
    assert plain._cache.num_slots == -(-longest // granule) * granule


def test_acceleration_rate_is_pooled_over_steps():
    decoded = [Decoded([], "length", accepted, 0.0, 0.0) for accepted in ([4, 3], [1], [])]
    assert acceleration_rate(decoded) == pytest.approx(8 / 3)
    assert math.isnan(acceleration_rate(decoded[2:]))


def test_heads_of_another_target_are_refused(target_of, monkeypatch):
    model = target_of("llama")
    for size, vocab in ((48, 25), (40, 24)):
        with pytest.raises(ConfigError):
            endless(model, MedusaHeads(MedusaShape(size, vocab, 3)), CHAIN)
    with pytest.raises(ValueError, match="deeper than these heads"):
        endless(model, MedusaHeads(MedusaShape(48, 24, 2)), CHAIN)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ConfigError):
        endless(model, MedusaHeads(MedusaShape(48, 24, 3)), CHAIN)


def test_a_decoder_refuses_what_it_cannot_decode(target_of):
    model = target_of("llama")
    decoder = endless(model, None, ())
    for prompt in ([], list(range(20)) * 5):
        with pytest.raises(ValueError, match="no room"):
            decoder.generate(prompt, 4)
    with pytest.raises(ValueError, match="generator"):
        decoder.generate(PROMPT, 4, RejectionSampling(0.7, 0.9))


def test_decoding_leaves_the_model_as_it_was(target_of):
    model = target_of("llama")
    stream = endless(model, None, ()).stream(PROMPT, 5)
    next(stream)
    inner = stream.gi_frame.f_locals["steps"]  # this reference keeps Python from closing it
    stream.close()
    assert not list(inner)
    assert not model.get_output_embeddings()._forward_pre_hooks
