"""Random steps for the acceptance rules, their paths written out, and the chi-square test."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from hypothesis import strategies as st

from pipeline.decoding.tree import Tree, TreePath

VOCAB = 5


@st.composite
def random_trees(draw: st.DrawFn, max_nodes: int = 12) -> tuple[TreePath, ...]:
    """Draw a tree over four heads and `VOCAB` guesses, node by node."""
    paths: list[TreePath] = [()]
    node = st.tuples(st.integers(0, 99), st.integers(0, VOCAB - 1))
    for parent, rank in draw(st.lists(node, max_size=max_nodes)):
        path = (*paths[parent % len(paths)], rank)
        if len(path) <= 4 and path not in paths:
            paths.append(path)
    return tuple(paths[1:])


def random_step(seed: int, choices: Iterable[TreePath], spread: float = 2.0):
    """Draw a tree, the target's logits, and the tokens that the heads guess."""
    generator = torch.Generator().manual_seed(seed)
    tree = Tree(choices)
    logits = torch.randn(tree.num_nodes + 1, VOCAB, generator=generator, dtype=torch.float64)
    guesses = [torch.randperm(VOCAB, generator=generator) for _ in range(tree.max_depth + 1)]
    tokens = [guesses[0][0], *(guesses[len(path)][path[-1]] for path in tree.choices)]
    return tree, logits * spread, torch.stack(tokens)


def candidates(tree: Tree, tokens: torch.Tensor) -> list[list[tuple[int, int, int]]]:
    """List every path of the tree without the root, as (row, parent row, token)."""
    row_of = {(): 0} | {path: row for row, path in enumerate(tree.choices, start=1)}
    found = []
    for path in ((), *tree.choices):
        rows = [row_of[path[:depth]] for depth in range(len(path) + 1)]
        found.append([(rows[d], rows[d - 1], int(tokens[rows[d]])) for d in range(1, len(rows))])
    return found


def typical_length(
    logits_TV: torch.Tensor, tokens: Sequence[int], temperature: float
) -> tuple[int, float]:
    """Compute how many tokens typical acceptance keeps, and their log likelihood (paper 2.3.1)."""
    length, likelihood = 0, 0.0
    for row, token in zip(logits_TV, tokens, strict=True):
        p = torch.softmax(row / temperature, 0).tolist()
        entropy = -sum(each * math.log(each) for each in p if each > 0)
        if not p[token] > min(0.09, 0.3 * math.exp(-entropy)):
            break
        length, likelihood = length + 1, likelihood + math.log(p[token])
    return length, likelihood


def gumbel(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Draw standard Gumbel noise in float64, by exponential draws."""
    generator = torch.Generator().manual_seed(seed)
    return -torch.empty(*shape, dtype=torch.float64).exponential_(generator=generator).log()


def chi_square_p(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """Compute the p-value of Pearson's chi-square test; rare cells are pooled."""
    num_samples = sum(counts)
    assert abs(sum(probabilities) - 1) < 1e-6
    pooled, rare_p, rare_count = [], 0.0, 0
    for p, count in sorted(zip(probabilities, counts, strict=True)):
        if p == 0 and count:
            return 0.0
        if rare_p * num_samples < 8:
            rare_p, rare_count = rare_p + p, rare_count + count
        else:
            pooled.append((p, count))
    pooled.append((rare_p, rare_count))
    statistic = sum((count - p * num_samples) ** 2 / (p * num_samples) for p, count in pooled)
    halves = torch.tensor([(len(pooled) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(*halves))
