"""Retrieved trees: what is found, which nodes are kept, and the text that the target writes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decoding.drafting import DraftDecoder
from pipeline.decoding.retrieval import (
    MAX_DEPTH,
    MAX_OCCURRENCES,
    MAX_SUFFIX,
    Datastore,
    Retrieval,
    most_frequent_tree,
)
from pipeline.errors import ConfigError
from tests.decoding.conftest import CONTEXT, FAMILIES, PROMPT, PROMPTS, seeded

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=40), max_size=6)


def drafting(model, texts, num_nodes: int = 12, eos=()) -> DraftDecoder:
    return DraftDecoder(model, Retrieval(Datastore(texts), num_nodes), eos_token_ids=eos)


def searched(texts: list[list[int]], context: list[int]) -> list[list[int]]:
    """Search every position of every text for the longest suffix."""
    for length in range(min(len(context), MAX_SUFFIX), 0, -1):
        found = []
        for text in texts:
            for start in range(len(text) - length + 1):
                if text[start : start + length] == context[-length:]:
                    found.append(text[start + length : start + length + MAX_DEPTH])
        if found:
            return found
    return []


@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=24), st.data())
def test_the_longest_suffix_is_found_wherever_it_occurs(texts, context, data):
    if texts:  # a context that ends within a text, so that long suffixes occur
        text = data.draw(st.sampled_from(texts))
        context = context + text[: data.draw(st.integers(0, len(text)))]
    store = Datastore(texts)
    assert sorted(store.continuations(context)) == sorted(searched(texts, context))


def test_of_many_occurrences_a_sample_keeps_the_shares():
    store = Datastore([[1, 2]] * 3000 + [[1, 3]] * 1000)
    found = Counter(each[0] for each in store.continuations([0, 1]))
    assert sum(found.values()) == pytest.approx(MAX_OCCURRENCES, abs=8)
    assert found[2] == pytest.approx(3 * found[3], rel=0.05)


@given(
    st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12),
    st.integers(1, 10),
)
def test_the_most_frequent_nodes_form_a_tree(continuations, num_nodes):
    draft = most_frequent_tree(continuations, num_nodes)
    paths = [()]
    for row, token in enumerate(draft.tokens, start=1):
        paths.append((*paths[draft.parents[row]], token))
        assert draft.depths[row] == len(paths[row])
    counts = Counter()
    for each in continuations:
        counts.update(tuple(each[:depth]) for depth in range(1, len(each) + 1))
    assert len(set(paths)) == len(paths)
    best = sorted(counts.values(), reverse=True)[:num_nodes]
    assert [counts[path] for path in paths[1:]] == best


@pytest.mark.parametrize("family", FAMILIES)
def test_retrieved_trees_keep_the_text_that_transformers_writes(family, target_of, continuation):
    """Some stored texts differ from the target's at one position."""
    model = target_of(family)
    texts = [continuation(model, prompt, 24) for prompt in PROMPTS]
    stored = [text[:7] + [23 - text[7]] + text[8:] for text in texts] + texts[:2] + PROMPTS
    decoder = drafting(model, stored)
    accepted = Counter()
    for prompt, text in zip(PROMPTS, texts, strict=True):
        decoded = decoder.generate(prompt, 24)
        assert decoded.token_ids == text
        accepted.update(decoded.accepted)
    assert 1 in accepted and max(accepted) > 3


def test_steps_without_a_guess_are_plain(target_of, continuation):
    model = target_of("llama")
    text = continuation(model, PROMPT, 24)
    rows = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    unseen = min(set(range(24)) - set(text))
    decoder = drafting(model, [[unseen] * 9])
    assert decoder.generate(PROMPT, 24).token_ids == text
    hook.remove()
    assert rows == [len(PROMPT)] + [1] * 23


def test_large_trees_have_room_in_the_cache(target_of, continuation):
    model = target_of("llama")
    texts = torch.randint(0, 24, (60, 24), generator=seeded(1)).tolist()
    text = continuation(model, PROMPT, CONTEXT - len(PROMPT))
    assert drafting(model, texts, num_nodes=250).generate(PROMPT, 1000).token_ids == text


def test_a_drafter_refuses_what_it_cannot_decode(target_of, monkeypatch):
    model = target_of("llama")
    with pytest.raises(ValueError, match="one text at a time, not for 2"):
        drafting(model, []).generate_batch(PROMPTS[:2], 4)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(ConfigError, match="takes no tree mask"):
        drafting(model, [])
