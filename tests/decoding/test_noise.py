"""Draws follow the distributions that they claim, one step at a time: chi-square tests against
exact laws.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TopPLogitsWarper

from pipeline.decoding.acceptance import Noise, RejectionSampling, TypicalAcceptance, draw, nucleus
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.steps import VOCAB, chi_square_p, gumbel, random_step

TREES = {
    "none": (),
    "one": ((0,),),
    "chain": ((0,), (0, 0), (0, 0, 0)),
    "full": cartesian_tree((3, 2)),
    "every-token": tuple((rank,) for rank in range(VOCAB)),
    "ragged": ((0,), (1,), (3,), (0, 2), (1, 0), (1, 0, 1)),
}
NUM_SAMPLES, DOUBT = 20_000, 1e-3


def law_of_rejection(tree, p, tokens) -> dict[tuple[int, int], float]:
    """How likely each (row, next token) is when children are tried one after another, as the method
    is defined.
    """
    law: Counter[tuple[int, int]] = Counter()

    def visit(row: int, reached: float) -> None:
        left = list(p[row])
        for child in (r for r in range(1, tree.num_nodes + 1) if int(tree.parent[r]) == row):
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
    """The target's distributions by transformers' own nucleus."""
    scores = logits / temperature
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1).tolist()


def outcomes(rule, tree, logits, tokens, seed: int) -> Counter[tuple[int, int]]:
    noise = gumbel((NUM_SAMPLES, tree.max_depth + 1, VOCAB), seed)
    found = rule.accept(
        logits.expand(NUM_SAMPLES, -1, -1), tokens.expand(NUM_SAMPLES, -1), tree, noise
    )
    return Counter(zip(found.row.tolist(), found.next_token.tolist(), strict=True))


def p_value(found: Counter, law: dict) -> float:
    support = sorted(found.keys() | law.keys())
    return chi_square_p([found[each] for each in support], [law.get(each, 0.0) for each in support])


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (1.5, 0.8)])
def test_rejection_has_the_law_of_trying_the_children_one_after_another(name, temperature, top_p):
    tree, logits, tokens = random_step(11, TREES[name], spread=1.0)
    law = law_of_rejection(tree, truncated(logits, temperature, top_p), tokens)
    found = outcomes(RejectionSampling(temperature, top_p), tree, logits, tokens, seed=5)
    assert p_value(found, law) > DOUBT


def test_law_of_rejection_gives_each_token_the_targets_own_probability():
    """The method as it is defined keeps the distribution: the twin above is itself what it should
    be.
    """
    for name, choices in TREES.items():
        tree, logits, tokens = random_step(11, choices, spread=1.0)
        p = truncated(logits, 1.0, 1.0)
        first = Counter()
        for (row, token), probability in law_of_rejection(tree, p, tokens).items():
            first[int(tokens[tree.retrieve_indices[row, 1]]) if row else token] += probability
        assert [first[token] for token in range(VOCAB)] == pytest.approx(p[0]), name


class KeepsRejectedChildren(RejectionSampling):
    """Wrong: after a rejection it draws from the whole distribution, the rejected children
    included.
    """

    def accept(self, logits_NV, tokens_N, tree, noise_TV=None):
        found = super().accept(logits_NV, tokens_N, tree, noise_TV)
        last_logits_V = logits_NV[torch.arange(NUM_SAMPLES), found.row]
        return found._replace(
            next_token=self.choose(last_logits_V, gumbel((NUM_SAMPLES, VOCAB), 9))
        )


class ForgetsTheTemperature(RejectionSampling):
    def choose(self, logits_V, noise_V=None):
        return super().choose(logits_V * 1.15, noise_V)


@pytest.mark.parametrize(
    "wrong",
    [KeepsRejectedChildren(1.0), ForgetsTheTemperature(1.0), TypicalAcceptance(1.0, samples=True)],
)
def test_the_test_sees_what_does_not_keep_the_distribution(wrong):
    tree, logits, tokens = random_step(11, TREES["ragged"], spread=1.0)
    law = law_of_rejection(tree, truncated(logits, 1.0, 1.0), tokens)
    assert p_value(outcomes(wrong, tree, logits, tokens, seed=5), law) < 1e-9


def test_rejection_draws_the_same_text_whatever_the_tree():
    """Positions have their noise: with the same logits for equal texts, only the number of tokens
    per step differs.
    """
    rule, noise = RejectionSampling(1.0), gumbel((500, 3, VOCAB), 3)
    logits_by_depth = torch.randn(
        3, VOCAB, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    plain = [
        [int(rule.choose(logits_by_depth[d], noise[s, d])) for d in range(3)] for s in range(500)
    ]
    for choices in TREES.values():
        tree, _, tokens = random_step(2, [path for path in choices if len(path) < 3])
        logits = logits_by_depth[tree.depth]
        for s in range(500):
            row, token = rule.accept(logits, tokens, tree, noise[s])
            written = [
                *tokens[tree.retrieve_indices[row, 1 : tree.depth[row] + 1]].tolist(),
                int(token),
            ]
            assert written == plain[s][: len(written)]


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**31), st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999]), st.integers(1, 40))
def test_the_nucleus_is_that_of_transformers(seed, top_p, vocab):
    logits = 3 * torch.randn(
        3, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    expected = TopPLogitsWarper(top_p)(None, logits).isfinite()
    assert nucleus(logits, top_p).equal(expected)


def test_of_equally_likely_tokens_the_lower_ids_are_in_the_nucleus():
    logits = torch.zeros(8)
    assert nucleus(logits, 0.5).tolist() == [True] * 4 + [False] * 4


def test_half_precision_logits_are_drawn_in_full_precision():
    """Divided by 0.7, 64 and 64.5 are 0.714 apart; the nearest numbers of bfloat16 are 0.5
    apart.
    """
    logits, noise = torch.tensor([64.0, 64.5], dtype=torch.bfloat16), torch.tensor([0.6, 0.0])
    assert int(draw(logits, noise, 0.7)) == 1
    assert int(draw(logits, noise + torch.tensor([0.2, 0.0]), 0.7)) == 0


def test_drawn_tokens_have_the_targets_probabilities():
    """With the noise that decoding uses, position after position of one generator."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -4.0, -torch.inf])
    noise = Noise(torch.Generator().manual_seed(4))
    counts = Counter()
    for _ in range(5_000):
        ahead = noise.ahead(2, logits[None])
        counts[int(draw(logits, ahead[0], 1.0)), int(draw(logits, ahead[1], 1.0))] += 1
        noise.advance(2)
    p = logits.softmax(-1).tolist()
    pairs = [(a, b) for a in range(6) for b in range(6)]
    assert chi_square_p([counts[pair] for pair in pairs], [p[a] * p[b] for a, b in pairs]) > DOUBT


def test_noise_belongs_to_positions_however_they_are_asked_for():
    logits = torch.zeros(1, 7)
    one_by_one, in_steps = (
        Noise(torch.Generator().manual_seed(8)),
        Noise(torch.Generator().manual_seed(8)),
    )
    expected = []
    for _ in range(9):
        expected.append(one_by_one.ahead(1, logits)[0])
        one_by_one.advance(1)
    position = 0
    for kept in (1, 3, 1, 2):
        ahead = in_steps.ahead(3, logits)
        assert ahead.equal(torch.stack(expected[position : position + 3]))
        in_steps.advance(kept)
        position += kept


def test_without_a_generator_there_is_no_noise():
    assert Noise(None).ahead(3, torch.zeros(1, 7)) is None
