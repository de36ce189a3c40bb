"""Lookahead decoding: n-grams by Jacobi iteration, verified as a tree (arXiv 2402.02057).

A window holds guesses for the next positions: `NGRAM` - 1 levels of `WINDOW` columns, the oldest
level first. Each forward extends every column by one token, the target's most probable one, which
completes an n-gram per column. The n-grams go into a pool by their first token, and the oldest
level leaves the window. The same forward verifies the pool's n-grams that begin with the last token
of the text.

Window and n-grams are one candidate tree below that token, so one mask serves both branches:

    level 0     a chain: the last token of the text (column 0, the root), then columns 1, 2, …
    level l     column j is the child of column j in level l - 1, so its depth is j + l
    n-grams     paths below the root

A path of the window that the target confirms is accepted like any other. The pool and the window
are those of one text. As in the authors' code, the window starts with random tokens of the prompt,
the pool with the prompt's n-grams, and a step moves the window by one position even if it accepts
several tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pipeline.decoding.drafting import Draft, Drafter

NGRAM = 5  # tokens; this and the next two as in the authors' example
WINDOW = 7  # columns
GUESSES = 7  # n-grams with the same first token, of which the latest are kept
SEED = 0  # of the window's first tokens


class Lookahead(Drafter):
    """Drafter of trees of a Jacobi window and of n-grams that earlier windows have completed.

    Args:
        window: The number of columns of the window.
        ngram: The number of tokens of an n-gram, at least 2.
        guesses: The maximum number of n-grams that a step verifies, at least 1.
    """

    def __init__(self, window: int = WINDOW, ngram: int = NGRAM, guesses: int = GUESSES):
        num_levels = ngram - 1
        num_nodes = window * num_levels - 1 + guesses * num_levels
        super().__init__(num_nodes, max(window + num_levels - 2, num_levels))
        self._window = window
        self._ngram = ngram
        self._guesses = guesses

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Begin another text with its prompt, a new window and a new pool."""
        super().begin(prompt_ids)
        self.predicted = []
        chosen = random.Random(SEED)
        self._levels: list[list[int]] = []
        for _ in range(self._ngram - 1):
            self._levels.append(chosen.choices(self.text, k=self._window))
        # The n-grams without their first token, by this token; the latest come last.
        self._pool: dict[int, list[tuple[int, ...]]] = {}
        for start in range(len(self.text) - self._ngram + 1):
            self._keep_ngram(self.text[start : start + self._ngram])

    def draft(self) -> Draft:
        """Propose the n-grams of the last token and the window; read the window's predictions."""
        if self.predicted:
            for ngram in zip(*self._levels, self.predicted, strict=True):
                self._keep_ngram(ngram)
            self._levels = [*self._levels[1:], self.predicted]
        root = self.text[-1]
        self._levels[0][0] = root
        draft = Draft()
        self._add_ngrams(draft, self._pool.get(root, []))
        self._add_window(draft)
        return draft

    def _keep_ngram(self, ngram: Sequence[int]) -> None:
        """Put an n-gram into the pool as the latest with its first token."""
        first, *rest = ngram
        ngrams = self._pool.setdefault(first, [])
        if tuple(rest) in ngrams:
            ngrams.remove(tuple(rest))
        ngrams.append(tuple(rest))
        del ngrams[: -self._guesses]

    def _add_ngrams(self, draft: Draft, ngrams: Sequence[Sequence[int]]) -> None:
        """Add n-grams below the root of a draft; equal beginnings share their rows."""
        children: dict[tuple[int, int], int] = {}
        for ngram in ngrams:
            row = 0
            for token in ngram:
                if (row, token) not in children:
                    children[row, token] = draft.add(token, row)
                row = children[row, token]

    def _add_window(self, draft: Draft) -> None:
        """Add the window to a draft, whose root is its first token; observe its last level."""
        row = 0
        rows = [row]
        for token in self._levels[0][1:]:
            row = draft.add(token, row)
            rows.append(row)
        for level in self._levels[1:]:
            below = []
            for token, parent in zip(level, rows, strict=True):
                below.append(draft.add(token, parent))
            rows = below
        draft.observed = rows
