from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.medusa.acceptance import TypicalAcceptance, acceptance_rule, greedy_acceptance
from pipeline.medusa.tree import Tree, greedy_tree
from tests.medusa.conftest import cartesian_tree

VOCAB = 5
EPS, DELTA = 0.09, 0.3

situations = st.tuples(
    st.integers(0, 2**31),
    st.sampled_from([(), ((0,),), cartesian_tree((2, 2)), cartesian_tree((3, 2, 1)), greedy_tree([[0.5, 0.4]] * 4, 9)]),
    st.sampled_from([0.3, 1.0, 4.0]),
)


def random_step(seed: int, choices) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """A tree, the target's logits, and tokens as heads guess them: one order of the vocabulary per depth."""
    generator = torch.Generator().manual_seed(seed)
    tree = Tree(choices)
    logits = torch.randn(tree.num_nodes + 1, VOCAB, generator=generator, dtype=torch.float64) * 2
    guesses = [torch.randperm(VOCAB, generator=generator).tolist() for _ in range(tree.max_depth + 1)]
    tokens = [guesses[0][0], *(guesses[len(path)][path[-1]] for path in tree.choices)]
    return tree, logits, torch.tensor(tokens)


def candidates(tree: Tree, tokens: torch.Tensor) -> list[list[tuple[int, int, int]]]:
    """Every path of the tree, root excluded, as (row, parent row, token)."""
    row_of = {(): 0} | {path: row for row, path in enumerate(tree.choices, start=1)}
    return [
        [(row_of[path[:d]], row_of[path[: d - 1]], int(tokens[row_of[path[:d]]])) for d in range(1, len(path) + 1)]
        for path in ((), *tree.choices)
    ]


@settings(deadline=None, max_examples=150)
@given(situations)
def test_greedy_keeps_what_the_target_would_have_written(situation):
    seed, choices, _ = situation
    tree, logits, tokens = random_step(seed, choices)
    row, next_token = greedy_acceptance(logits, tokens, tree)

    best = logits.argmax(-1).tolist()
    row_after = {(parent, token): row for path in candidates(tree, tokens) for row, parent, token in path}
    expected = 0
    while (expected, best[expected]) in row_after:
        expected = row_after[expected, best[expected]]
    assert (row, next_token) == (expected, best[expected])


@settings(deadline=None, max_examples=150)
@given(situations)
def test_typical_is_the_papers_formula_over_every_candidate(situation):
    seed, choices, temperature = situation
    tree, logits, tokens = random_step(seed, choices)
    verdict = TypicalAcceptance(temperature, EPS, DELTA)(logits, tokens, tree)

    best = (0, 0.0, 0)  # length, log likelihood, row
    for path in candidates(tree, tokens):
        length, likelihood, last = 0, 0.0, 0
        for row, parent, token in path:
            scaled = [value / temperature for value in logits[parent].tolist()]
            total = sum(map(math.exp, scaled))
            p = [math.exp(value) / total for value in scaled]
            entropy = -sum(each * math.log(each) for each in p)
            if not p[token] > min(EPS, DELTA * math.exp(-entropy)):
                break
            length, likelihood, last = length + 1, likelihood + math.log(p[token]), row
        if (length, likelihood) > best[:2]:
            best = (length, likelihood, last)
    assert verdict.row == best[2]
    assert verdict.next_token == logits[verdict.row].argmax()


def chain_step(best: list[int], tokens: list[int]) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """A chain of guesses under a target that is sure of `best`."""
    tree = Tree([(0,) * depth for depth in range(1, len(tokens))])
    logits = torch.full((len(best), VOCAB), -20.0)
    logits[torch.arange(len(best)), torch.tensor(best)] = 20.0
    return tree, logits, torch.tensor(tokens)


RULES = [greedy_acceptance, TypicalAcceptance(0.7)]


@pytest.mark.parametrize("rule", RULES)
def test_token_id_zero_is_a_token_like_any_other(rule):
    verdict = rule(*reorder(chain_step([0, 0, 3], [2, 0, 0])))
    assert (int(verdict.row), int(verdict.next_token)) == (2, 3)


@pytest.mark.parametrize("rule", RULES)
def test_rows_past_a_short_path_are_never_accepted(rule):
    """The reference pads short candidates with token 0 and accepts the padding when the target says 0."""
    tree = Tree([(0,), (1,), (1, 0), (1, 0, 0)])
    tokens = torch.tensor([4, 1, 2, 3, 3])
    logits = torch.full((5, VOCAB), -20.0)
    logits[0, 1] = logits[1, 0] = 20.0  # (0,) is right, and after it the target says 0
    logits[2:, 0] = 20.0
    verdict = rule(logits, tokens, tree)
    assert (int(verdict.row), int(verdict.next_token)) == (1, 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_right_guess_below_a_wrong_one_is_not_accepted(rule):
    verdict = rule(*reorder(chain_step([1, 2, 3], [0, 4, 2])))
    assert (int(verdict.row), int(verdict.next_token)) == (0, 1)


@pytest.mark.parametrize("rule", RULES)
def test_the_roots_own_token_is_never_judged(rule):
    for token in range(VOCAB):
        verdict = rule(*reorder(chain_step([1, 2, 3], [token, 1, 2])))
        assert (int(verdict.row), int(verdict.next_token)) == (2, 3)


def reorder(step: tuple[Tree, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, Tree]:
    tree, logits, tokens = step
    return logits, tokens, tree


@pytest.mark.parametrize("rule", RULES)
def test_batches_are_judged_row_by_row(rule):
    tree = Tree(cartesian_tree((2, 2)))
    logits, tokens = torch.randn(6, 7, VOCAB), torch.randint(VOCAB, (6, 7))
    together = rule(logits, tokens, tree)
    for i in range(6):
        alone = rule(logits[i], tokens[i], tree)
        assert (alone.row, alone.next_token) == (together.row[i], together.next_token[i])


def test_likelier_of_two_equally_long_candidates_wins():
    tree = Tree([(0,), (1,)])
    logits = torch.log(torch.tensor([[0.1, 0.35, 0.45, 0.05, 0.05]] * 3))
    assert int(TypicalAcceptance(1.0)(logits, torch.tensor([0, 1, 2]), tree).row) == 2


def test_temperature_zero_is_greedy_acceptance():
    assert acceptance_rule("typical", 0.0) is acceptance_rule("greedy", 0.7) is greedy_acceptance
    assert acceptance_rule("typical", 0.7, 0.1, 0.2) == TypicalAcceptance(0.7, 0.1, 0.2)
    with pytest.raises(ValueError, match="temperature"):
        TypicalAcceptance(0.0)


def test_impossible_tokens_do_not_turn_the_entropy_into_nan():
    tree, logits, tokens = Tree([(0,)]), torch.tensor([[0.0, 0.0, -torch.inf], [5.0, 0.0, -torch.inf]]), [2, 1]
    assert int(TypicalAcceptance(1.0)(logits, torch.tensor(tokens), tree).row) == 1
