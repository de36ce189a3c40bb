"""Made-up steps for the acceptance rules, their paths spelt out, and the chi-square test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from hypothesis import strategies as st

from pipeline.decoding.tree import Tree, TreePath

VOCAB = 5


@st.composite
def random_trees(draw: st.DrawFn, max_nodes: int = 12) -> tuple[TreePath, ...]:
    """Any tree over four heads and `VOCAB` guesses: each node below one that is there already."""
    paths: list[TreePath] = [()]
    for parent, rank in draw(
        st.lists(st.tuples(st.integers(0, 99), st.integers(0, VOCAB - 1)), max_size=max_nodes)
    ):
        path = (*paths[parent % len(paths)], rank)
        if len(path) <= 4 and path not in paths:
            paths.append(path)
    return tuple(paths[1:])


def random_step(
    seed: int, choices: Iterable[TreePath], spread: float = 2.0
) -> tuple[Tree, torch.Tensor, torch.Tensor]:
    """A tree, the target's logits, and tokens as heads guess them: one order of the vocabulary per
    depth.
    """
    generator = torch.Generator().manual_seed(seed)
    tree = Tree(choices)
    logits = (
        torch.randn(tree.num_nodes + 1, VOCAB, generator=generator, dtype=torch.float64) * spread
    )
    guesses = [
        torch.randperm(VOCAB, generator=generator).tolist() for _ in range(tree.max_depth + 1)
    ]
    tokens = [guesses[0][0], *(guesses[len(path)][path[-1]] for path in tree.choices)]
    return tree, logits, torch.tensor(tokens)


def candidates(tree: Tree, tokens: torch.Tensor) -> list[list[tuple[int, int, int]]]:
    """Every path of the tree, root excluded, as (row, parent row, token)."""
    row_of = {(): 0} | {path: row for row, path in enumerate(tree.choices, start=1)}
    return [
        [
            (row_of[path[:d]], row_of[path[: d - 1]], int(tokens[row_of[path[:d]]]))
            for d in range(1, len(path) + 1)
        ]
        for path in ((), *tree.choices)
    ]


def gumbel(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Standard Gumbel noise in float64, by exponential draws."""
    generator = torch.Generator().manual_seed(seed)
    return -torch.empty(*shape, dtype=torch.float64).exponential_(generator=generator).log()


def chi_square_p(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """How likely counts at least this far from the probabilities are (Pearson); rare cells are
    pooled.
    """
    num_samples = sum(counts)
    assert abs(sum(probabilities) - 1) < 1e-6
    cells = sorted(zip(probabilities, counts, strict=True))
    pooled, rare = [], [0.0, 0]
    for probability, count in cells:
        if probability == 0 and count:
            return 0.0
        if rare[0] * num_samples < 8:
            rare = [rare[0] + probability, rare[1] + count]
        else:
            pooled.append((probability, count))
    pooled.append((rare[0], rare[1]))
    statistic = sum((count - p * num_samples) ** 2 / (p * num_samples) for p, count in pooled)
    half_freedom = torch.tensor((len(pooled) - 1) / 2, dtype=torch.float64)
    return float(
        torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64))
    )
