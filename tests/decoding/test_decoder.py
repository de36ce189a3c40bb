from __future__ import annotations

import math

import pytest
import torch
from transformers import DynamicCache

from pipeline.decoding.acceptance import TypicalAcceptance
from pipeline.decoding.decoder import Decoder, acceleration_rate, plain_decoder
from pipeline.decoding.tree import cartesian_tree, check_choices
from pipeline.errors import ConfigError
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.decoding.conftest import FAMILIES

CHAIN = ((0,), (0, 0), (0, 0, 0))
SPARSE = ((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 0), (1, 0, 1))
TREES = {
    "chain": CHAIN,
    "sparse": SPARSE,
    "wide": tuple((rank,) for rank in range(24)),
    "full": cartesian_tree((3, 2, 2)),
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def with_a_wrong_best_guess(heads: MedusaHeads, text: list[int]) -> MedusaHeads:
    """Makes a token that the text lacks every head's best guess, so that the accepted rows are
    never the first.
    """
    wrong = next(token for token in range(heads.shape.vocab_size) if token not in text)
    heads.lm_head.data[:, wrong] = 4 * heads.lm_head.data.sum(1)  # one-hot logits sum to about 1
    return heads


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tree_decoding_writes_what_transformers_writes(
    family, target_of, continuation, fitted_heads
):
    model = target_of(family)
    expected = continuation(model, PROMPT, 40)
    heads = fitted_heads(model, PROMPT + expected, 3, known=0.7)
    decoded = Decoder(model, heads, SPARSE, eos_token_ids=()).generate(PROMPT, 40)
    plain = plain_decoder(model, eos_token_ids=()).generate(PROMPT, 40)
    assert decoded.token_ids == plain.token_ids == expected
    assert {1, 3} <= set(decoded.accepted), "the case must see guesses accepted and refused"
    assert plain.accepted == [1] * 39


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("known", [0.0, 0.5, 1.0])
def test_no_tree_and_no_heads_change_the_text(name, known, target_of, continuation, fitted_heads):
    model = target_of("mistral-window")
    expected = continuation(model, PROMPT, 40)
    heads = fitted_heads(model, PROMPT + expected, 3, known)
    decoded = Decoder(model, heads, TREES[name], eos_token_ids=()).generate(PROMPT, 24)
    assert decoded.token_ids == expected[:24]
    if known == 1.0:
        assert max(decoded.accepted) == 1 + max(map(len, TREES[name]))


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2-both-windows"])
def test_cache_after_compaction_is_that_of_the_accepted_tokens_alone(
    family, target_of, continuation, fitted_heads
):
    model = target_of(family)
    text = continuation(model, PROMPT, 40)
    heads = with_a_wrong_best_guess(fitted_heads(model, PROMPT + text, 3), text)
    decoder = Decoder(model, heads, cartesian_tree((2, 2, 2)), eos_token_ids=())
    ids = list(PROMPT)
    for new_ids in decoder.stream(PROMPT, 40):
        ids += new_ids
        cache = decoder._cache
        assert cache.length == len(ids) - 1
        if len(ids) < len(PROMPT) + 12:
            continue
        plain = DynamicCache()
        with torch.no_grad():
            model(input_ids=torch.tensor([ids[:-1]]), past_key_values=plain)
        for layer, expected in zip(cache.layers, plain.layers, strict=True):
            torch.testing.assert_close(
                layer.keys[:, :, : cache.length], expected.keys, atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(
                layer.values[:, :, : cache.length], expected.values, atol=1e-5, rtol=1e-5
            )
        break


def test_paths_that_do_not_lie_in_order_are_moved(target_of, continuation, fitted_heads):
    model = target_of("llama")
    expected = continuation(model, PROMPT, 40)
    heads = with_a_wrong_best_guess(fitted_heads(model, PROMPT + expected, 3), expected)
    decoded = Decoder(model, heads, cartesian_tree((2, 2, 2)), eos_token_ids=()).generate(
        PROMPT, 40
    )
    assert decoded.token_ids == expected
    assert decoded.accepted == [4] * 9 + [3]


def test_target_runs_once_per_step_and_once_for_the_prompt(target_of, continuation, fitted_heads):
    model = target_of("llama")
    heads = fitted_heads(model, PROMPT + continuation(model, PROMPT, 40), 3, known=0.7)
    rows = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    decoded = Decoder(model, heads, SPARSE, eos_token_ids=()).generate(PROMPT, 30)
    hook.remove()
    assert rows == [len(PROMPT)] + [1 + len(SPARSE)] * decoded.num_steps
    assert sum(decoded.accepted) == len(decoded.token_ids) - 1


@pytest.mark.parametrize("position", [1, 4, 5, 6, 11])
def test_an_end_token_inside_an_accepted_path_ends_the_text_there(
    position, target_of, continuation, fitted_heads
):
    model = target_of("qwen3-head-dim")
    text = continuation(model, PROMPT, 40)[:24]
    heads = fitted_heads(model, PROMPT + text, 3)
    ends = [text[position], 23]
    decoded = Decoder(model, heads, CHAIN, eos_token_ids=ends).generate(PROMPT, 24)
    assert (
        decoded.token_ids
        == continuation(model, PROMPT, 24, ends)
        == text[: text.index(text[position]) + 1]
    )
    assert decoded.finished == "stop"
    assert (
        plain_decoder(model, eos_token_ids=ends).generate(PROMPT, 24).token_ids == decoded.token_ids
    )
    assert sum(decoded.accepted) == len(decoded.token_ids) - 1


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_length_cuts_inside_an_accepted_path(num_tokens, target_of, continuation, fitted_heads):
    model = target_of("llama")
    text = continuation(model, PROMPT, 40)[:20]
    heads = fitted_heads(model, PROMPT + text, 3)
    decoded = Decoder(model, heads, CHAIN, eos_token_ids=()).generate(PROMPT, num_tokens)
    assert (decoded.token_ids, decoded.finished) == (text[:num_tokens], "length")
    assert sum(decoded.accepted) == num_tokens - 1


def test_an_end_token_behind_the_length_cut_does_not_count(target_of, continuation, fitted_heads):
    model = target_of("mistral-window")
    text = continuation(model, PROMPT, 40)
    heads = fitted_heads(model, PROMPT + text, 3)
    for num_tokens in range(1, 6):
        ends = [text[num_tokens]]  # in most cases within the last step's path
        if ends[0] not in text[:num_tokens]:
            decoded = Decoder(model, heads, CHAIN, eos_token_ids=ends).generate(PROMPT, num_tokens)
            assert (decoded.token_ids, decoded.finished) == (text[:num_tokens], "length")


def test_text_ends_with_the_context_even_where_positions_are_a_table(
    target_of, continuation, fitted_heads
):
    model = target_of("gpt2-positions")
    prompt = [token % 24 for token in range(86)]
    text = continuation(model, prompt, 10)
    heads = fitted_heads(model, prompt + text, 3)
    decoded = Decoder(model, heads, CHAIN, eos_token_ids=()).generate(prompt, 50)
    assert decoded.token_ids == text and decoded.finished == "length"


@pytest.mark.parametrize("prompt", [[], list(range(20)) * 5])
def test_a_prompt_without_room_is_refused(prompt, target_of):
    with pytest.raises(ValueError, match="no room"):
        plain_decoder(target_of("llama"), eos_token_ids=()).generate(prompt, 4)


def test_a_decoder_forgets_the_last_prompt(target_of, continuation, fitted_heads):
    model = target_of("mistral-window")
    heads = fitted_heads(model, PROMPT + continuation(model, PROMPT, 40)[:20], 3)
    decoder, plain = (
        Decoder(model, heads, SPARSE, eos_token_ids=()),
        plain_decoder(model, eos_token_ids=()),
    )
    for prompt in (PROMPT, [2], [5, 6] * 20, PROMPT[::-1], PROMPT):
        expected = continuation(model, prompt, 12)
        assert (
            decoder.generate(prompt, 12).token_ids
            == plain.generate(prompt, 12).token_ids
            == expected
        )


def test_cache_grows_for_a_longer_sequence(target_of, continuation, monkeypatch):
    monkeypatch.setattr("pipeline.decoding.cache._GRANULE", 1)
    model = target_of("llama")
    plain = plain_decoder(model, eos_token_ids=())
    for prompt in ([2], PROMPT * 3, PROMPT):
        assert plain.generate(prompt, 12).token_ids == continuation(model, prompt, 12)
    assert plain._cache.num_slots == len(PROMPT) * 3 + 12 + 1


def test_acceleration_rate_is_pooled_over_sequences_without_the_prefills_token(
    target_of, continuation, fitted_heads
):
    model = target_of("llama")
    heads = fitted_heads(model, PROMPT + continuation(model, PROMPT, 40), 3)
    decoder = Decoder(model, heads, CHAIN, eos_token_ids=())
    decoded = [
        decoder.generate(PROMPT, 21),
        decoder.generate([5, 6], 8),
        decoder.generate(PROMPT, 1),
    ]
    steps = sum(one.num_steps for one in decoded)
    assert acceleration_rate(decoded) == pytest.approx((20 + 7 + 0) / steps)
    assert acceleration_rate([plain_decoder(model, eos_token_ids=()).generate(PROMPT, 9)]) == 1.0
    assert math.isnan(acceleration_rate(decoded[2:]))


def written_by_the_papers_words(
    model, heads, choices, prompt, num_tokens, temperature, eps, delta
) -> list[int]:
    """Typical acceptance without a cache, a mask or a tree: one full forward per candidate."""

    @torch.no_grad()
    def read(ids):
        seen = []
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0])
        )
        logits = model(input_ids=torch.tensor([ids])).logits[0]
        hook.remove()
        return seen[0][0], logits

    hidden, logits = read(prompt)
    text = [int(logits[-1].argmax())]
    while len(text) < num_tokens:
        guesses = heads(hidden[-1:])[:, 0].topk(8).indices
        best, kept = (0, 0.0), []
        for path in choices:
            tokens = [int(guesses[depth, rank]) for depth, rank in enumerate(path)]
            _, logits = read(prompt + text + tokens)
            length, likelihood = 0, 0.0
            for token, row in zip(tokens, logits[-1 - len(tokens) : -1], strict=True):
                p = torch.softmax(row / temperature, 0)
                entropy = -sum(each * math.log(each) for each in p.tolist() if each > 0)
                if not p[token] > min(eps, delta * math.exp(-entropy)):
                    break
                length, likelihood = length + 1, likelihood + math.log(p[token])
            if (length, likelihood) > best:
                best, kept = (length, likelihood), tokens[:length]
        text += kept
        hidden, logits = read(prompt + text)
        text.append(int(logits[-1].argmax()))
    return text[:num_tokens]


@pytest.mark.parametrize("temperature", [0.1, 4.0])
def test_typical_decoding_follows_the_paper_step_by_step(
    temperature, target_of, continuation, fitted_heads
):
    model = target_of("qwen2")
    heads = fitted_heads(model, PROMPT + continuation(model, PROMPT, 40), 3, known=0.1)
    choices = (*cartesian_tree((6, 3)), (0, 0, 0), (1, 0, 0))
    expected = written_by_the_papers_words(
        model, heads, choices, PROMPT, 10, temperature, 0.09, 0.3
    )
    decoder = Decoder(model, heads, choices, eos_token_ids=())
    assert decoder.generate(PROMPT, 10, TypicalAcceptance(temperature)).token_ids == expected
    assert decoder.generate(PROMPT, 10).token_ids != expected, (
        "the case must see more accepted than greedily"
    )


def test_heads_of_another_vocabulary_or_size_are_refused(target_of):
    for config in (MedusaShape(48, 25, 3), MedusaShape(40, 24, 3)):
        with pytest.raises(ConfigError, match="heads have"):
            Decoder(target_of("llama"), MedusaHeads(config), CHAIN, eos_token_ids=())


def test_an_attention_that_takes_no_tree_mask_is_refused(target_of, monkeypatch):
    model = target_of("llama")
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ConfigError, match="flash_attention_2"):
        Decoder(model, MedusaHeads(MedusaShape(48, 24, 3)), CHAIN, eos_token_ids=())


def test_a_tree_deeper_than_the_heads_is_a_programmers_error(target_of):
    heads = MedusaHeads(MedusaShape(48, 24, 2))
    with pytest.raises(ValueError, match="deeper than these heads"):
        Decoder(target_of("llama"), heads, check_choices(CHAIN, 3, 1), eos_token_ids=())


def test_decoding_leaves_the_model_as_it_was(target_of):
    model = target_of("llama")
    stream = plain_decoder(model, eos_token_ids=()).stream(PROMPT, 5)
    next(stream)
    stream.close()
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_a_model_in_training_mode_is_refused(target_of):
    model = target_of("llama")
    model.train()
    try:
        with pytest.raises(ValueError, match="eval"):
            plain_decoder(model, eos_token_ids=())
    finally:
        model.eval()
