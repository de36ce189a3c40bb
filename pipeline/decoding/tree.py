"""Static candidate trees: the authors' tree, validation and tensors.

A path is a sequence of ranks, one per depth: (0, 2) is the third guess of head 1 after the best
guess of head 0. A tree is a set of paths that contains every prefix of its members. Each path is a
node; the root, the token that the target has already chosen, is not counted as a node (paper 2.1.2,
2.3.3). Functions that take a tree also accept lists of lists, as in JSON.

Stock trees come from the Medusa authors' code (medusa/model/medusa_choices.py), where they were
searched for the authors' models.

Letters: N rows (the root and the nodes), K heads, R ranks (guesses per head), T positions on a
path, the root included.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from pipeline.errors import ConfigError
from pipeline.heads.draft_cache import DraftCache
from pipeline.heads.kind import Heads, Level

TreePath = tuple[int, ...]
Choices = Iterable[Sequence[int]]  # the paths of a tree, without the root

# The authors' default tree, `mc-sim-7b-63`, was searched for Vicuna-7B. It is written as numbers of
# children (ranks 0, 1, 2, …): first of the root, then of each path of depth 1 in order, and so on.
# Paths after the last number have no children.
CHILDREN = ("10", "10 7 3 2 1 1 1 1 1 1", "10 3 2 1 1 1 1 1 0 0 2 0 0 0 0 0 0 1", "2")


def stock_tree(max_depth: int) -> tuple[TreePath, ...]:
    """Return the paths of the stock candidate tree up to `max_depth`, shallow paths first."""
    level: list[TreePath] = [()]
    paths = []
    for numbers in CHILDREN[:max_depth]:
        below: list[TreePath] = []
        for path, count in zip(level, numbers.split(), strict=False):
            below += [(*path, rank) for rank in range(int(count))]
        paths += below
        level = below
    return tuple(paths)


def cartesian_tree(widths: Sequence[int]) -> tuple[TreePath, ...]:
    """Return the full tree of each head k's best `widths[k]` guesses (paper 2.1.2)."""
    paths: list[TreePath] = []
    for depth in range(1, len(widths) + 1):
        paths += itertools.product(*map(range, widths[:depth]))
    return tuple(paths)


def check_choices(choices: Choices, num_heads: int, top: int) -> tuple[TreePath, ...]:
    """Validate the choices of a static candidate tree; return them as paths, in their order.

    Raises ConfigError unless the choices form a tree of at least one node over `num_heads` heads
    and the best `top` guesses of each head.
    """
    paths = []
    for choice in choices:
        is_list = isinstance(choice, list | tuple) and 0 < len(choice) <= num_heads
        if not is_list or any(type(rank) is not int or not 0 <= rank < top for rank in choice):
            raise ConfigError(
                f"{choice!r} is not a path of a tree over {num_heads} heads and {top} guesses"
                " each.",
                "choices",
                "Give lists of ranks such as [0, 2].",
            )
        paths.append(tuple(choice))
    for path in paths:
        if paths.count(path) > 1 or path[:-1] not in [(), *paths]:
            raise ConfigError(
                f"The path {list(path)} is repeated or its parent is missing.",
                "choices",
                "Give each path once, with all paths above it.",
            )
    if not paths:
        raise ConfigError("The tree has no nodes.", "choices", "Give at least one path: [0].")
    return tuple(paths)


class TreeRows:
    """Tensors of one candidate tree, or of one tree per text with a leading dimension B.

    Attributes:
        parent: [N], each row's parent; the root's is itself.
        depth: [N], each row's depth; the root's is 0.
        retrieve_indices: [N, T], the rows on the path from the root to row i, padded with 0.
        ancestors: [N, N], whether row i attends to row j: j is i or above it.
        elsewhere: [N, N], whether row j is not a guess on the path to row i: j is the root, or is
            neither i nor above i.
    """

    def __init__(self, parent: Tensor, depth: Tensor, max_depth: int):
        self.parent = parent
        self.depth = depth
        self.max_depth = max_depth
        num_rows = depth.shape[-1]
        device = depth.device
        self.retrieve_indices = depth.new_zeros(*depth.shape, max_depth + 1)
        row = torch.arange(num_rows, device=device).expand_as(depth)
        for steps_up in range(max_depth + 1):
            place = (depth - steps_up).clamp(min=0)
            self.retrieve_indices.scatter_(-1, place[..., None], row[..., None])
            row = parent.gather(-1, row)
        # The padding 0 is the root, an ancestor of every row.
        ancestors = torch.zeros(*depth.shape, num_rows, dtype=torch.bool, device=device)
        self.ancestors = ancestors.scatter_(-1, self.retrieve_indices, True)
        self.elsewhere = ~self.ancestors | (depth == 0)[..., None, :]

    def path_to(self, row_B: Tensor) -> Tensor:
        """Return the path [B, T] from the root to one tree row per text, padded with 0."""
        paths_BNT = self.retrieve_indices.expand(len(row_B), -1, -1)
        return paths_BNT.take_along_dim(row_B[:, None, None], 1)[:, 0]

    def depth_of(self, row: Tensor) -> Tensor:
        """Return the depth of one tree row per text, in the shape of `row`."""
        return self.depth.expand(*row.shape, -1).gather(-1, row[..., None])[..., 0]


class Tree(TreeRows):
    """A static candidate tree; row 0 is the root, row i + 1 is the path `tree.choices[i]`.

    The given choices must form a tree (see `check_choices`). They are sorted by depth, so parents
    come before their children. `Tree(())` has only the root, for plain decoding. `top`, `guess` and
    `levels` are described in `ProposalTree`.
    """

    def __init__(self, choices: Choices, device: torch.device | str = "cpu"):
        paths = sorted(map(tuple, choices), key=lambda path: (len(path), path))
        self.choices: tuple[TreePath, ...] = tuple(paths)
        self.num_nodes = len(paths)
        self.top = max((path[-1] + 1 for path in paths), default=0)
        rows = [(), *paths]
        parents = [rows.index(path[:-1]) for path in rows]  # the root's is the root
        depths = [len(path) for path in rows]
        super().__init__(
            torch.tensor(parents, device=device), torch.tensor(depths, device=device), depths[-1]
        )
        guesses = [(len(path) - 1) * self.top + path[-1] for path in paths]
        self.guess = torch.tensor(guesses, dtype=torch.int64, device=device)
        self.levels = tuple(self._levels(device))

    def grow(
        self, heads: Heads, hidden_BD: Tensor, token_B: Tensor, cache: DraftCache | None = None
    ) -> tuple[TreeRows, Tensor]:
        """Return this static tree, and the tokens [B, N] of its rows: the root and the guesses."""
        guesses_BN = heads.propose(hidden_BD, token_B, self, cache)
        return self, torch.cat((token_B[:, None], guesses_BN), 1)

    def _levels(self, device: torch.device | str) -> Iterator[Level]:
        """Yield the candidate tree's nodes level by level, from the root's children on."""
        above: list[TreePath] = [()]
        for _, nodes in itertools.groupby(self.choices, len):
            level = list(nodes)
            inner = sorted({path[:-1] for path in level})
            parent = [inner.index(path[:-1]) for path in level]
            guess = [at * self.top + path[-1] for at, path in zip(parent, level, strict=True)]
            places = [above.index(path) for path in inner]
            yield Level(
                inner=torch.tensor(places, device=device),
                parent=torch.tensor(parent, device=device),
                guess=torch.tensor(guess, device=device),
            )
            above = level
