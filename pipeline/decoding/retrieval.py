"""Retrieval: guesses are what followed the same tokens in a datastore of texts (arXiv 2311.08252).

The longest suffix of the text that occurs in the datastore is looked up, and the continuations of
its occurrences form a trie. The most frequent nodes of this trie are the candidate tree. Text that
the target itself has written is the best datastore: its continuations are the target's own.

Limits: suffixes of at most `MAX_SUFFIX` tokens, continuations of at most `MAX_DEPTH` tokens, at
most `MAX_OCCURRENCES` of them. A token takes 16 bytes of memory, and a microsecond to index.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from pipeline.decoding.tree import TreeRows

MAX_SUFFIX = 16  # tokens, as in the paper
MAX_DEPTH = 10  # tokens, as in the paper
MAX_OCCURRENCES = 256  # with so many, a lookup takes about 0.5 ms on one CPU core
SEPARATOR = 0  # between texts; token ids are stored plus 1

Texts = Iterable[Sequence[int] | npt.NDArray[np.integer]]


class Datastore:
    """Texts of token ids in which suffixes of a context are looked up by a suffix array."""

    def __init__(self, texts: Texts):
        parts = []
        for text in texts:
            parts.append(np.asarray(text, np.int32) + 1)
            parts.append(np.array([SEPARATOR], np.int32))
        # A continuation near the end must not reach beyond the array.
        parts.append(np.full(MAX_SUFFIX + MAX_DEPTH, SEPARATOR, np.int32))
        self._tokens = np.concatenate(parts)
        # Big-endian bytes compare as the tokens do.
        self._bytes = self._tokens.astype(">i4").tobytes()
        self._order = _suffix_order(self._tokens)

    def continuations(self, context: Sequence[int]) -> list[list[int]]:
        """Return what followed the longest suffix of `context` that occurs in the datastore.

        There is one list of at most `MAX_DEPTH` tokens per occurrence; it is shorter at the end of
        a text. Of more than `MAX_OCCURRENCES`, evenly spaced ones in sorted order are taken.
        Without an occurrence of the last token there are none.
        """
        occurrences = self._order[:0]
        occurs = 0
        fails = min(len(context), MAX_SUFFIX) + 1
        while fails - occurs > 1:  # a suffix occurs if a longer one does
            length = (occurs + fails) // 2
            found = self._occurrences(context[-length:])
            if len(found):
                occurs = length
                occurrences = found
            else:
                fails = length
        step = -(-len(occurrences) // MAX_OCCURRENCES) or 1
        starts = occurrences[::step] + occurs
        continuations = []
        for stored in self._tokens[starts[:, None] + np.arange(MAX_DEPTH)].tolist():
            own = itertools.takewhile(lambda token: token != SEPARATOR, stored)
            continuations.append([token - 1 for token in own])
        return continuations

    def _occurrences(self, pattern: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return the positions at which the pattern of at most `MAX_SUFFIX` tokens occurs."""
        wanted = (np.asarray(pattern, np.int32) + 1).astype(">i4").tobytes()

        def beginning(position: int) -> bytes:
            return self._bytes[4 * position : 4 * position + len(wanted)]

        first = bisect_left(self._order, wanted, key=beginning)
        last = bisect_right(self._order, wanted, lo=first, key=beginning)
        return self._order[first:last]


def _suffix_order(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Sort all positions by the `MAX_SUFFIX` tokens from there on; the last must be a separator.

    Prefix doubling: pairs of ranks by w tokens give the ranks by 2 w tokens. Beyond the end are
    separators, which have rank 0.
    """
    rank = tokens.astype(np.int64)
    width = 1
    while width < MAX_SUFFIX:
        later = np.zeros_like(rank)
        later[:-width] = rank[width:]
        _, rank = np.unique(rank * (rank.max() + 1) + later, return_inverse=True)
        width *= 2
    return np.argsort(rank, kind="stable")


@dataclass
class Draft:
    """A candidate tree of guessed tokens.

    Attributes:
        tokens: The guessed tokens; guess i is row i + 1, because row 0 is the root.
        parents: The parent's row of each row; the root's is itself.
        depths: The depth of each row; the root's is 0.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=lambda: [0])
    depths: list[int] = field(default_factory=lambda: [0])

    def add(self, token: int, parent: int) -> int:
        """Add a guess below the row `parent`, and return its row."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens)

    def rows(self, device: torch.device) -> TreeRows:
        """Return the tensors of this candidate tree."""
        parent_N = torch.tensor(self.parents, device=device)
        depth_N = torch.tensor(self.depths, device=device)
        return TreeRows(parent_N, depth_N, max(self.depths))


def most_frequent_tree(continuations: Sequence[Sequence[int]], num_nodes: int) -> Draft:
    """Return the trie's `num_nodes` most frequent nodes, by how many continuations pass a node.

    No node is more frequent than its parent, so these nodes form a tree. Ties are broken by the
    lower depth, then by the earlier continuation.
    """
    draft = Draft()
    # Nodes whose parents are in the tree: (-frequency, depth, serial number, parent, members).
    waiting: list[tuple[int, int, int, int, list[Sequence[int]]]] = []
    serial = itertools.count()
    row = 0
    members = list(continuations)
    while len(draft.tokens) < num_nodes:
        depth = draft.depths[row]
        children: dict[int, list[Sequence[int]]] = {}
        for continuation in members:
            if depth < len(continuation):
                children.setdefault(continuation[depth], []).append(continuation)
        for below in children.values():
            heapq.heappush(waiting, (-len(below), depth + 1, next(serial), row, below))
        if not waiting:
            break
        _, depth, _, parent, members = heapq.heappop(waiting)
        row = draft.add(members[0][depth - 1], parent)
    return draft


class Retrieval:
    """Drafter of continuations in a datastore, for one text at a time.

    Attributes:
        num_nodes: The maximum number of guesses in a tree.
        text: The prompt and the tokens decoded so far; the last one is the root of the next tree.
    """

    def __init__(self, datastore: Datastore, num_nodes: int):
        self.num_nodes = num_nodes
        self.text: list[int] = []
        self._datastore = datastore

    def draft(self) -> Draft:
        """Propose the most frequent continuations of the longest suffix in the datastore."""
        return most_frequent_tree(self._datastore.continuations(self.text), self.num_nodes)
