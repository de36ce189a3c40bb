"""The tree of candidates that one decoding step verifies: known shapes, validation and tensors.

A path is a sequence of ranks, one per depth: (0, 2) is the third guess of head 1 after the best
guess of head 0. A tree is a set of paths that contains every prefix of its members. Each path is a
node; the root, the token that the target has already chosen, is not counted as one (paper 2.1.2,
2.3.3). Lists of lists, as JSON has them, are accepted wherever a tree is.

Letters: N rows (the root and the nodes), K heads, R ranks (guesses per head), T positions on a
    path, the root included.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from math import prod

import torch

from pipeline.errors import ConfigError
from pipeline.heads.kind import Heads, Level

TreePath = tuple[int, ...]
Choices = Iterable[Sequence[int]]  # the paths of a tree, without the root


def expected_acceleration_rate(accuracy_KR: Sequence[Sequence[float]], choices: Choices) -> float:
    """Expected tokens per step (2.3.3): 1 for the target's own token, plus each node's probability,
    the product of the accuracies on its path."""
    return 1.0 + sum(
        prod(accuracy_KR[depth][rank] for depth, rank in enumerate(path)) for path in choices
    )


def greedy_tree(
    accuracy_KR: Sequence[Sequence[float]], num_nodes: int, max_depth: int | None = None
) -> tuple[TreePath, ...]:
    """The tree of at most `num_nodes` nodes with the highest expected acceleration rate (2.3.3).

    Repeatedly adds the connected node with the largest product of accuracies a_k(i). No node is
    more probable than its parent, so the result is optimal and its first n nodes are the best tree
    of n. Guesses with accuracy 0 are left out.
    """
    depth_limit = min(len(accuracy_KR), max_depth or len(accuracy_KR))
    chosen: list[TreePath] = []
    frontier: list[tuple[float, int, TreePath]] = [(-1.0, 0, ())]
    while frontier and len(chosen) <= num_nodes:
        negative, depth, path = heapq.heappop(frontier)
        chosen.append(path)
        if depth < depth_limit:
            for rank, accuracy in enumerate(accuracy_KR[depth]):
                if accuracy > 0:
                    heapq.heappush(frontier, (negative * accuracy, depth + 1, (*path, rank)))
    return tuple(chosen[1:])  # without the root


def cartesian_tree(widths: Sequence[int]) -> tuple[TreePath, ...]:
    """The full tree over the best `widths[k]` guesses of each head k (2.1.2); all ones: the chain
    of first guesses.
    """
    levels = (itertools.product(*map(range, widths[:depth])) for depth in range(1, len(widths) + 1))
    return tuple(path for level in levels for path in level)


def check_choices(choices: Choices, num_heads: int, top: int) -> tuple[TreePath, ...]:
    """The choices as paths, in their order.

    Raises ConfigError unless they form a tree over `num_heads` heads and the best `top` guesses of
    each.
    """
    paths: list[TreePath] = []
    for choice in choices:
        is_path = isinstance(choice, Sequence) and not isinstance(choice, str) and len(choice) > 0
        if not is_path or not all(type(rank) is int for rank in choice):
            fix = "Give lists of ranks such as [0, 2]."
            raise ConfigError(f"{choice!r} is not a path of the tree.", "choices", fix)
        paths.append(tuple(choice))
    if not paths:
        raise ConfigError(
            "The tree has no nodes.", "choices", "Give at least one path, such as [0]."
        )
    known = set(paths)
    if len(known) < len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise ConfigError(
            f"The path {list(repeated)} is given twice.", "choices", "Give each path once."
        )
    for path in paths:
        if len(path) > num_heads:
            fix = f"Paths are at most {num_heads} long."
            raise ConfigError(
                f"The path {list(path)} is deeper than the {num_heads} heads.", "choices", fix
            )
        if not all(0 <= rank < top for rank in path):
            fix = f"Ranks are 0 to {top - 1}."
            raise ConfigError(
                f"The path {list(path)} asks for a guess that is not made.", "choices", fix
            )
        if len(path) > 1 and path[:-1] not in known:
            fix = f"Add {list(path[:-1])}."
            raise ConfigError(
                f"The path {list(path)} is not connected: its parent is missing.", "choices", fix
            )
    return tuple(paths)


class Tree:
    """A tree's tensors: row 0 is the root, row i + 1 is `choices[i]`, parents come before their
    children.

    Rows are in depth-first order, so the path of best guesses, the one most often accepted, is rows
    1, 2, 3, …, whose cache entries need not be moved. `Tree(())` is plain decoding. ValueError
    unless the choices form a tree.

    Tensors: `parent` [N] (the root's is itself), `depth` [N], `guess` [N-1] (row in the flattened
    [K, R] guesses of the first `max_depth` heads, `top` each), `ancestors` [N, N] (row i attends to
    row j: j is i or above it), `elsewhere` [N, N] (j is not a guess on the path to row i: neither i
    nor above it, or the root), `retrieve_indices` [N, T] (rows from the root to row i, padded with
    0 past its depth); `levels` and `order` as in `ProposalTree`.
    """

    def __init__(self, choices: Choices, device: torch.device | str = "cpu"):
        self.choices: tuple[TreePath, ...] = tuple(sorted(map(tuple, choices)))
        self.num_nodes = len(self.choices)
        self.max_depth = max(map(len, self.choices), default=0)
        self.top = max((rank + 1 for path in self.choices for rank in path), default=0)
        row_of = {(): 0} | {path: row for row, path in enumerate(self.choices, start=1)}
        if len(row_of) <= self.num_nodes or any(path[:-1] not in row_of for path in self.choices):
            raise ValueError(
                "not a tree: a path is repeated or its parent is missing; `check_choices` names it"
            )
        paths = [[row_of[path[:depth]] for depth in range(len(path) + 1)] for path in row_of]
        padded = [rows + [0] * (self.max_depth + 1 - len(rows)) for rows in paths]
        self.retrieve_indices = torch.tensor(padded, device=device)
        self.depth = torch.tensor([len(path) for path in row_of], device=device)
        self.parent = torch.tensor([row_of[path[:-1]] for path in row_of], device=device)
        guesses = [(len(path) - 1) * self.top + path[-1] for path in self.choices]
        self.guess = torch.tensor(guesses, dtype=torch.int64, device=device)
        self.levels, self.order = _levels(self.choices, device)
        itself_NN = torch.eye(self.num_nodes + 1, dtype=torch.bool, device=device)
        self.ancestors = itself_NN.scatter_(
            1, self.retrieve_indices, True
        )  # padding marks the root, above every row
        self.elsewhere = ~self.ancestors | (self.depth == 0)

    def described(self) -> str:
        return f"a tree of {self.num_nodes} nodes"

    def grow(
        self, heads: Heads, hidden_BD: torch.Tensor, token_B: torch.Tensor
    ) -> tuple[Tree, torch.Tensor]:
        """This tree, and the tokens [B, N] of its rows: the root's, then the heads' guesses."""
        return self, torch.cat((token_B[:, None], heads.propose(hidden_BD, token_B, self)), 1)

    def path_to(self, row_B: torch.Tensor) -> torch.Tensor:
        """The rows [B, T] from the root to one row each, padded with 0 past its depth."""
        return self.retrieve_indices.index_select(0, row_B)

    def depth_of(self, row: torch.Tensor) -> torch.Tensor:
        """The depth of each of these rows, in their shape."""
        return self.depth.take(row)


def _levels(
    choices: tuple[TreePath, ...], device: torch.device | str
) -> tuple[tuple[Level, ...], torch.Tensor]:
    """A tree's nodes depth by depth, and where each of the `choices` lies among them."""

    def places(values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    levels: list[Level] = []
    above: list[TreePath] = [()]
    laid: list[TreePath] = []
    for depth in range(1, max(map(len, choices), default=0) + 1):
        nodes = [path for path in choices if len(path) == depth]
        inner = sorted({path[:-1] for path in nodes})
        top = 1 + max(path[-1] for path in nodes)
        parent = [inner.index(path[:-1]) for path in nodes]
        guess = (place * top + path[-1] for place, path in zip(parent, nodes, strict=True))
        levels.append(Level(places(map(above.index, inner)), places(parent), places(guess), top))
        above, laid = nodes, laid + nodes
    return tuple(levels), places(map(laid.index, choices))
