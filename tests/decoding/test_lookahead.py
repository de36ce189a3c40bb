"""Lookahead decoding: its window, its pool of n-grams, and the text that the target writes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from pipeline.decoding.acceptance import RejectionSampling
from pipeline.decoding.drafting import Draft, DraftDecoder
from pipeline.decoding.lookahead import Lookahead
from tests.decoding.conftest import FAMILIES, PROMPT, PROMPTS, endless, seeded

CPU = torch.device("cpu")


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each row, without the root."""
    found = [()]
    for token, parent in zip(draft.tokens, draft.parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


def test_a_window_row_attends_to_level_0_and_its_column():
    window, ngram = 4, 4
    drafter = Lookahead(window, ngram)
    drafter.begin([7])  # a prompt without n-grams
    tree = drafter.draft().rows(CPU)
    cells = [(0, column) for column in range(window)]
    for level in range(1, ngram - 1):
        cells += [(level, column) for column in range(window)]
    for row, (level, column) in enumerate(cells):
        visible = {(0, j) for j in range(column + 1)} | {(k, column) for k in range(level + 1)}
        attended = {cells[i] for i in tree.ancestors[row].nonzero().flatten().tolist()}
        assert attended == visible
        assert tree.depth[row] == level + column == len(visible) - 1


def test_the_pool_fills_with_what_the_target_predicts():
    """The target writes 3 t + 1 modulo 32 after t; 5 and 9 are on one cycle of 16 numbers."""
    drafter = Lookahead(window=3, ngram=4, guesses=2)
    drafter.begin([5, 9])
    for step in range(40):
        draft = drafter.draft()
        tokens = [drafter.text[-1], *draft.tokens]
        written = []
        for _ in range(3):
            written.append((3 * (written or tokens[:1])[-1] + 1) % 32)
        if step > 24:  # each column has gone round
            assert tuple(written) in paths(draft)
        drafter.predicted = [(3 * tokens[row] + 1) % 32 for row in draft.observed]
        drafter.text.append(written[0])


def test_the_n_gram_of_column_0_begins_with_the_text():
    drafter = Lookahead(window=1, ngram=3, guesses=2)
    drafter.begin([1])
    for predicted, token in ((5, 2), (6, 2)):
        drafter.draft()
        drafter.predicted = [predicted]
        drafter.text.append(token)
    assert (5, 6) in paths(drafter.draft())


def test_the_latest_n_grams_of_a_token_are_verified():
    """A window of one column has no path of two tokens."""
    drafter = Lookahead(window=1, ngram=3, guesses=2)
    drafter.begin([1, 2, 3, 1, 4, 5, 1, 2, 3, 1, 6, 7, 1])
    ngrams = {path for path in paths(drafter.draft()) if len(path) == 2}
    assert ngrams == {(2, 3), (6, 7)}, "(4, 5) is the oldest"
    drafter.begin([1, 8, 9, 1])
    ngrams = {path for path in paths(drafter.draft()) if len(path) == 2}
    assert ngrams == {(8, 9)}, "the pool is of one text"


def test_n_grams_with_one_beginning_share_their_rows():
    drafter = Lookahead(window=1, ngram=4, guesses=3)
    drafter.begin([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 7, 1])
    found = paths(drafter.draft())
    shared = {(2,), (2, 3), (2, 3, 4), (2, 3, 5), (2, 6), (2, 6, 7)}
    assert shared <= set(found) and len(found) == 1 + len(shared) + 2, "the root and two levels"


@pytest.mark.parametrize("shape", [(7, 5, 7), (1, 2, 1), (2, 3, 1), (4, 2, 3)])
def test_no_tree_is_larger_than_announced(shape):
    drafter = Lookahead(*shape)
    drafter.begin(PROMPT * 6)
    for token in PROMPT * 2:
        draft = drafter.draft()
        assert len(draft.tokens) <= drafter.num_nodes
        assert max(draft.depths) <= drafter.max_depth
        drafter.predicted = [(token * row) % 24 for row in draft.observed]
        drafter.text.append(token)


@pytest.mark.parametrize("family", FAMILIES)
def test_lookahead_writes_what_transformers_writes(family, target_of, continuation):
    model = target_of(family)
    decoder = DraftDecoder(model, Lookahead(), eos_token_ids=())
    accepted = Counter()
    for prompt in PROMPTS:
        decoded = decoder.generate(prompt, 48)
        assert decoded.token_ids == continuation(model, prompt, 48)
        accepted.update(decoded.accepted)
    assert 1 in accepted and max(accepted) > 2


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_a_seed_writes_one_text_with_and_without_lookahead(top_p, target_of):
    model, rule = target_of("gemma2-both-windows"), RejectionSampling(0.5, top_p)
    plain, kept = endless(model, None, ()), Counter()
    decoder = DraftDecoder(model, Lookahead(), eos_token_ids=())
    for seed in range(6):
        expected = plain.generate(PROMPT, 32, rule, seeded(seed)).token_ids
        decoded = decoder.generate(PROMPT, 32, rule, seeded(seed))
        assert decoded.token_ids == expected
        kept.update(decoded.accepted)
    assert max(kept) > 1
