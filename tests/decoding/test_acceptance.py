from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.decoding.acceptance import (
    RejectionSampling,
    TypicalAcceptance,
    acceptance_rule,
    greedy_acceptance,
)
from pipeline.decoding.tree import Tree, cartesian_tree, greedy_tree
from tests.decoding.steps import VOCAB, candidates, gumbel, random_step, random_trees

EPS, DELTA = 0.09, 0.3

situations = st.tuples(
    st.integers(0, 2**31),
    st.sampled_from(
        [
            (),
            ((0,),),
            cartesian_tree((2, 2)),
            cartesian_tree((3, 2, 1)),
            greedy_tree([[0.5, 0.4]] * 4, 9),
        ]
    )
    | random_trees(),
    st.sampled_from([0.3, 1.0, 4.0]),
)


@settings(deadline=None, max_examples=150)
@given(situations)
def test_greedy_keeps_what_the_target_would_have_written(situation):
    seed, choices, _ = situation
    tree, logits, tokens = random_step(seed, choices)
    row, next_token = greedy_acceptance.accept(logits, tokens, tree)

    best = logits.argmax(-1).tolist()
    row_after = {
        (parent, token): row for path in candidates(tree, tokens) for row, parent, token in path
    }
    expected = 0
    while (expected, best[expected]) in row_after:
        expected = row_after[expected, best[expected]]
    assert (row, next_token) == (expected, best[expected])


@settings(deadline=None, max_examples=150)
@given(situations)
def test_typical_is_the_papers_formula_over_every_candidate(situation):
    seed, choices, temperature = situation
    tree, logits, tokens = random_step(seed, choices)

    def passes(p: list[float], token: int) -> bool:
        entropy = -sum(each * math.log(each) for each in p)
        return p[token] > min(EPS, DELTA * math.exp(-entropy))

    row = longest_candidate(tree, logits, tokens, temperature, passes)
    accepted = TypicalAcceptance(temperature, EPS, DELTA).accept(logits, tokens, tree)
    assert (accepted.row, accepted.next_token) == (row, logits[row].argmax())

    noise = gumbel((tree.max_depth + 1, VOCAB), seed)
    sampled = TypicalAcceptance(temperature, EPS, DELTA, samples=True).accept(
        logits, tokens, tree, noise
    )
    assert (sampled.row, sampled.next_token) == (
        row,
        (logits[row] / temperature + noise[tree.depth[row]]).argmax(),
    )


def longest_candidate(tree, logits, tokens, temperature, passes) -> int:
    """The last row of the longest candidate whose tokens all pass; of several, of the likeliest."""
    best = (0, 0.0, 0)  # length, log likelihood, row
    for path in candidates(tree, tokens):
        length, likelihood, last = 0, 0.0, 0
        for row, parent, token in path:
            p = softmax(logits[parent].tolist(), temperature)
            if not passes(p, token):
                break
            length, likelihood, last = length + 1, likelihood + math.log(p[token]), row
        if (length, likelihood) > best[:2]:
            best = (length, likelihood, last)
    return best[2]


def softmax(logits: list[float], temperature: float) -> list[float]:
    exponentials = [math.exp(value / temperature) for value in logits]
    return [value / sum(exponentials) for value in exponentials]


def chain_step(best: list[int], tokens: list[int]) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """A chain of guesses under a target that is sure of `best`."""
    tree = Tree([(0,) * depth for depth in range(1, len(tokens))])
    logits = torch.full((len(best), VOCAB), -20.0)
    logits[torch.arange(len(best)), torch.tensor(best)] = 20.0
    return tree, logits, torch.tensor(tokens)


RULES = [
    greedy_acceptance,
    TypicalAcceptance(0.7),
    TypicalAcceptance(0.7, samples=True),
    RejectionSampling(0.7),
    RejectionSampling(0.7, 0.9),
]


def accept(rule, step: tuple[Tree, torch.Tensor, torch.Tensor]) -> tuple[int, int]:
    tree, logits, tokens = step
    noise = gumbel((tree.max_depth + 1, VOCAB), 0)  # far below the 40 between right and wrong
    accepted = rule.accept(logits, tokens, tree, noise if rule.samples else None)
    return int(accepted.row), int(accepted.next_token)


@pytest.mark.parametrize("rule", RULES)
def test_token_id_zero_is_a_token_like_any_other(rule):
    assert accept(rule, chain_step([0, 0, 3], [2, 0, 0])) == (2, 3)


@pytest.mark.parametrize("rule", RULES)
def test_rows_past_a_short_path_are_never_accepted(rule):
    """The reference pads short candidates with token 0 and accepts the padding when the target says
    0.
    """
    tree = Tree([(0,), (1,), (1, 0), (1, 0, 0)])
    tokens = torch.tensor([4, 1, 2, 3, 3])
    logits = torch.full((5, VOCAB), -20.0)
    logits[0, 1] = logits[1, 0] = 20.0  # (0,) is right, and after it the target says 0
    logits[2:, 0] = 20.0
    assert accept(rule, (tree, logits, tokens)) == (1, 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_root_that_repeats_the_next_token_is_not_its_own_child(rule):
    assert accept(rule, chain_step([0, 2], [0, 3])) == (0, 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_right_guess_below_a_wrong_one_is_not_accepted(rule):
    assert accept(rule, chain_step([1, 2, 3], [0, 4, 2])) == (0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_the_roots_own_token_is_always_accepted(rule):
    for token in range(VOCAB):
        assert accept(rule, chain_step([1, 2, 3], [token, 1, 2])) == (2, 3)


@pytest.mark.parametrize("rule", RULES)
def test_batches_are_judged_row_by_row(rule):
    tree = Tree(cartesian_tree((2, 2)))
    logits, tokens = torch.randn(2, 30, 7, VOCAB), torch.randint(VOCAB, (2, 30, 7))
    noise = gumbel((2, 30, 3, VOCAB), 1)
    together = rule.accept(logits, tokens, tree, noise if rule.samples else None)
    assert together.row.unique().numel() > 2
    for i in range(30):
        alone = rule.accept(logits[1, i], tokens[1, i], tree, noise[1, i] if rule.samples else None)
        assert (alone.row, alone.next_token) == (together.row[1, i], together.next_token[1, i])


@pytest.mark.parametrize("rule", RULES)
def test_without_a_tree_a_rule_chooses_as_it_does_at_a_root_without_children(rule):
    logits, noise = torch.randn(200, VOCAB) * 2, gumbel((200, VOCAB), 2)
    chosen = rule.choose(logits, noise if rule.samples else None)
    at_root = rule.accept(
        logits[:, None],
        torch.zeros(200, 1, dtype=torch.int64),
        Tree(()),
        noise[:, None] if rule.samples else None,
    )
    assert at_root.row.eq(0).all() and at_root.next_token.equal(chosen)
    assert chosen.ne(logits.argmax(-1)).any() == rule.samples


def test_likelier_of_two_equally_long_candidates_wins():
    tree = Tree([(0,), (1,)])
    logits = torch.log(torch.tensor([[0.1, 0.35, 0.45, 0.05, 0.05]] * 3))
    assert int(TypicalAcceptance(1.0).accept(logits, torch.tensor([0, 1, 2]), tree).row) == 2


def test_temperature_zero_is_greedy_acceptance():
    for name in ("typical", "rejection"):
        assert (
            acceptance_rule(name, 0.0, top_p=0.9)
            is acceptance_rule("greedy", 0.7)
            is greedy_acceptance
        )


def test_a_rule_is_made_by_its_name():
    assert acceptance_rule("typical", 0.7, 0.1, 0.2) == TypicalAcceptance(0.7, 0.1, 0.2)
    assert acceptance_rule("typical", 0.7, first_token="sampled") == TypicalAcceptance(
        0.7, 0.09, 0.3, samples=True
    )
    assert acceptance_rule("rejection", 0.7, top_p=0.9) == RejectionSampling(0.7, 0.9)
    assert acceptance_rule("rejection", 0.7) == RejectionSampling(0.7, 1.0)


@pytest.mark.parametrize("make", [TypicalAcceptance, RejectionSampling])
def test_a_rule_of_chance_needs_a_temperature(make):
    with pytest.raises(ValueError, match="temperature"):
        make(0.0)


@pytest.mark.parametrize("top_p", [0.0, 1.1])
def test_top_p_is_a_probability(top_p):
    with pytest.raises(ValueError, match="top_p"):
        RejectionSampling(0.7, top_p)


def test_impossible_tokens_do_not_turn_the_entropy_into_nan():
    tree, logits, tokens = (
        Tree([(0,)]),
        torch.tensor([[0.0, 0.0, -torch.inf], [5.0, 0.0, -torch.inf]]),
        [2, 1],
    )
    assert int(TypicalAcceptance(1.0).accept(logits, torch.tensor(tokens), tree).row) == 1
