"""A batch writes what each of its texts is alone, in float64, where rounding cannot tell them
apart.
"""

from __future__ import annotations

import pytest
import torch

from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.masks import TreeMasks  # noqa
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.conftest import CONTEXT
from tests.decoding.test_acceptance import RULES
from tests.decoding.test_decoder import FAMILIES, PROMPT, SPARSE

PROMPTS = [PROMPT, [2], [5, 6] * 20, PROMPT[::-1], PROMPT * 2]


def seeded(number: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in range(number)]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_text_of_a_batch_is_what_transformers_writes(family, pair, continuation):
    model, heads = pair(family)
    expected = [continuation(model, prompt, 24) for prompt in PROMPTS]
    medusa = Decoder(model, heads, SPARSE, eos_token_ids=()).generate_batch(PROMPTS, 24)
    plain = plain_decoder(model, eos_token_ids=()).generate_batch(PROMPTS, 24)
    assert [one.token_ids for one in medusa] == [one.token_ids for one in plain] == expected
    assert len({one.num_steps for one in medusa}) > 1, "texts must go on by different lengths"
    assert all(one.accepted == [1] * 23 for one in plain)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "tree", [(), SPARSE, cartesian_tree((3, 2))], ids=["plain", "sparse", "cartesian"]
)
def test_every_rule_judges_a_batch_as_it_judges_each_text(rule, tree, pair):
    model, heads = pair("mistral-window")
    decoder = Decoder(model, heads, tree, eos_token_ids=())
    together = decoder.generate_batch(PROMPTS, 16, rule, seeded(len(PROMPTS)))
    for prompt, generator, one in zip(PROMPTS, seeded(len(PROMPTS)), together, strict=True):
        alone = decoder.generate(prompt, 16, rule, generator)
        assert (one.token_ids, one.accepted) == (alone.token_ids, alone.accepted)


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
    assert [one.token_ids for one in decoded] == [
        continuation(model, prompt, 24, ends) for prompt in PROMPTS
    ]
    steps = batches[len(PROMPTS) :]
    assert steps == [
        sum(one.num_steps > step for one in decoded)
        for step in range(max(one.num_steps for one in decoded))
    ]
    assert len(set(steps)) > 2


def test_texts_end_at_the_context_each_for_itself(pair):
    model, heads = pair("gpt2-positions")
    prompts = [PROMPT * 11, PROMPT * 5, [2] * (CONTEXT - 1)]
    decoder = Decoder(model, heads, SPARSE, eos_token_ids=())
    together = decoder.generate_batch(prompts, 30)
    assert [one.token_ids for one in together] == [
        decoder.generate(prompt, 30).token_ids for prompt in prompts
    ]
    assert [len(one.token_ids) for one in together] == [8, 30, 1]


def test_batches_of_every_size_follow_one_another_in_one_cache(pair, continuation, monkeypatch):
    monkeypatch.setattr("pipeline.decoding.cache._GRANULE", 1)
    model, heads = pair("llama")
    decoder = Decoder(model, heads, SPARSE, eos_token_ids=())
    for prompts in (PROMPTS[:2], PROMPTS[1:2], PROMPTS, PROMPTS[::-1][:3]):
        texts = [one.token_ids for one in decoder.generate_batch(prompts, 12)]
        assert texts == [continuation(model, prompt, 12) for prompt in prompts]


def test_seconds_of_a_batch_count_from_its_last_prefill(pair):
    model, heads = pair("llama")
    decoded = Decoder(model, heads, SPARSE, eos_token_ids=()).generate_batch(PROMPTS[:3], 12)
    waits = [one.seconds_prefill for one in decoded]
    assert waits == sorted(waits) and waits[0] > 0 and all(one.seconds > 0 for one in decoded)
