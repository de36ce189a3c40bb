"""A tree as heads see it when they propose: nodes of each depth, their parents and their guesses.

Letters: N nodes of a tree, M of one depth, P of the depth above that have children.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Level(NamedTuple):
    """One depth of a tree: which nodes of the depth above have children, P of them, and the M
    children.
    """

    inner: Tensor  # [P]: places among the nodes of the depth above
    parent: Tensor  # [M]: each child's parent, as a place in `inner`
    guess: Tensor  # [M]: each child's place in the parents' flattened [P, top] guesses
    top: int


class ProposalTree(Protocol):
    """What a proposal needs to know of a tree: as a whole, and depth by depth from the root's
    children on.
    """

    max_depth: int
    top: int  # guesses per head
    guess: Tensor  # [N]: each node's place in the flattened [max_depth, top] guesses
    levels: tuple[Level, ...]
    order: Tensor  # [N]: each node's place among the levels' nodes, end to end
