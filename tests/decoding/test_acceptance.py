"""Rules against their definitions; draws follow their laws, by chi-square tests."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from pipeline.decoding.acceptance import (
    Noise,
    RejectionSampling,
    TypicalAcceptance,
    acceptance_rule,
    greedy_acceptance,
    nucleus_mask,
    sample_tokens,
)
from pipeline.decoding.tree import Tree, cartesian_tree
from tests.decoding.steps import (
    VOCAB,
    candidates,
    chi_square_p,
    gumbel,
    random_step,
    random_trees,
    typical_length,
)

RULES = [
    greedy_acceptance,
    TypicalAcceptance(0.7),
    RejectionSampling(0.7),
    RejectionSampling(0.7, 0.9),
]
TREES = {
    "none": (),
    "chain": ((0,), (0, 0), (0, 0, 0)),
    "full": cartesian_tree((3, 2)),
    "every-token": tuple((rank,) for rank in range(VOCAB)),
    "ragged": ((0,), (1,), (3,), (0, 2), (1, 0), (1, 0, 1)),
}
NUM_SAMPLES, DOUBT = 20_000, 1e-3
trees = st.sampled_from(list(TREES.values())) | random_trees()


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**31), trees)
def test_greedy_keeps_what_the_target_would_have_written(seed, choices):
    tree, logits, tokens = random_step(seed, choices)
    best = logits.argmax(-1).tolist()
    row_after = {}
    for path in candidates(tree, tokens):
        row_after |= {(parent, token): row for row, parent, token in path}
    expected = 0
    while (expected, best[expected]) in row_after:
        expected = row_after[expected, best[expected]]
    assert greedy_acceptance.accept(logits, tokens, tree) == (expected, best[expected])


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**31), trees, st.sampled_from([0.3, 1.0, 4.0]))
def test_typical_is_the_papers_formula_over_every_candidate(seed, choices, temperature):
    tree, logits, tokens = random_step(seed, choices)
    best, row = (0, 0.0), 0
    for path in candidates(tree, tokens):
        _, parents, path_tokens = zip(*path, strict=True) if path else ((), (), ())
        found = typical_length(logits[list(parents)], path_tokens, temperature)
        if found > best:
            best, row = found, path[found[0] - 1][0]
    accepted = TypicalAcceptance(temperature).accept(logits, tokens, tree)
    assert accepted == (row, logits[row].argmax())


def test_impossible_tokens_keep_the_entropy_finite():
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [5.0, 0.0, -torch.inf]])
    assert TypicalAcceptance(1.0).accept(logits, torch.tensor([2, 1]), Tree([(0,)])).row == 1


def test_a_rule_is_made_by_its_name():
    assert acceptance_rule("greedy", 0.7) is greedy_acceptance
    assert acceptance_rule("rejection", 0.0, top_p=0.9) is greedy_acceptance
    assert acceptance_rule("typical", 0.7, 0.04).delta == 0.2
    assert acceptance_rule("rejection", 0.7, top_p=0.9) == RejectionSampling(0.7, 0.9)
    for temperature, top_p in ((-0.1, 1.0), (0.7, 0.0)):
        with pytest.raises(ValueError, match="temperature"):
            acceptance_rule("rejection", temperature, top_p=top_p)


def law_of_rejection(tree, p, tokens) -> dict[tuple[int, int], float]:
    """Compute the probability of each (row, next token) of sequential rejection sampling."""
    law: Counter[tuple[int, int]] = Counter()

    def visit(row: int, reached: float) -> None:
        left = list(p[row])
        for child in range(1, tree.num_nodes + 1):
            if tree.parent[child] == row:
                token = int(tokens[child])
                accepted = left[token] / sum(left) if sum(left) > 0 else 0.0
                visit(child, reached * accepted)
                reached *= 1 - accepted
                left[token] = 0.0
        for token, mass in enumerate(left):
            if mass > 0:
                law[row, token] += reached * mass / sum(left)

    visit(0, 1.0)
    return law


def truncated(logits, temperature: float, top_p: float) -> list[list[float]]:
    """Compute the target's distributions with transformers' top-p warper."""
    scores = logits / temperature
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1).tolist()


def p_of_law(rule, step, law: dict) -> float:
    """Compute the p-value of `NUM_SAMPLES` draws of a rule under a distribution."""
    tree, logits, tokens = step
    noise = gumbel((NUM_SAMPLES, tree.max_depth + 1, VOCAB), 5)
    logits, tokens = logits.expand(NUM_SAMPLES, -1, -1), tokens.expand(NUM_SAMPLES, -1)
    found = rule.accept(logits, tokens, tree, noise)
    counts = Counter(zip(found.row.tolist(), found.next_token.tolist(), strict=True))
    support = sorted(counts.keys() | law.keys())
    return chi_square_p(
        [counts[each] for each in support], [law.get(each, 0.0) for each in support]
    )


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.5, 0.8)])
def test_rejection_has_the_law_of_trying_children_in_turn(name, temperature, top_p):
    tree, logits, tokens = step = random_step(11, TREES[name], spread=1.0)
    law = law_of_rejection(tree, truncated(logits, temperature, top_p), tokens)
    assert p_of_law(RejectionSampling(temperature, top_p), step, law) > DOUBT


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**31), st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999]), st.integers(1, 40))
def test_the_nucleus_is_that_of_transformers(seed, top_p, vocab):
    logits = 3 * gumbel((3, vocab), seed)
    assert nucleus_mask(logits, top_p).equal(TopPLogitsWarper(top_p)(None, logits).isfinite())


def test_half_precision_logits_are_drawn_in_full_precision():
    """64 / 0.7 and 64.5 / 0.7 are 0.714 apart; numbers of bfloat16 there are 0.5 apart."""
    logits = torch.tensor([64.0, 64.5], dtype=torch.bfloat16)
    assert sample_tokens(logits, torch.tensor([0.6, 0.0]), 0.7) == 1
    assert sample_tokens(logits, torch.tensor([0.8, 0.0]), 0.7) == 0


def test_drawn_tokens_have_the_targets_probabilities():
    """The noise is drawn as in decoding, position after position from one generator."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0, -torch.inf])
    noise, counts = Noise(torch.Generator().manual_seed(4)), Counter()
    for _ in range(5_000):
        counts[tuple(sample_tokens(logits, noise.next_noise(2, logits[None]), 1.0).tolist())] += 1
        noise.discard(2)
    p = logits.softmax(-1)
    pairs = torch.cartesian_prod(torch.arange(6), torch.arange(6)).tolist()
    assert (
        chi_square_p([counts[tuple(pair)] for pair in pairs], torch.outer(p, p).flatten()) > DOUBT
    )
