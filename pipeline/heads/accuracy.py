"""Losses and top-k accuracies of draft heads, for the report and the tree search (paper 2.3.3).

Sums are over labelled positions only, so they can be added over batches and workers. A head's
guesses are the top-k of its logits, as in decoding; heads that read tokens get the true ones
(teacher forcing). A label outside the draft vocabulary is a miss.

Letters: N rows, C rows of a chunk, D hidden size, V vocabulary of the heads, K heads, R ranks
(guesses per head).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from pipeline.conversations.spans import IGNORED
from pipeline.heads.kind import Heads
from pipeline.heads.rows import Rows
from pipeline.heads.shapes import HeadsShape

MISS = 255  # rank of a token that is not among the guesses
NO_LABEL = 254  # rank past the end of the span
RANKED_BYTES = 256 << 20  # of logits at a time


class Score(NamedTuple):
    """Sums of the draft heads' losses and hits over labels.

    Attributes:
        losses_K: The sum of each head's cross entropies, over labels in the heads' vocabulary.
        hits_KR: The number of labels among each head's first 1, 2, …, R guesses.
        counts_K: The number of each head's labels.
        tokens_V: For each row of the lm_head, how often its token is a label of head 0.
        drafted_K: The number of each head's labels in the heads' vocabulary.
    """

    losses_K: Tensor
    hits_KR: Tensor
    counts_K: Tensor
    tokens_V: Tensor
    drafted_K: Tensor

    @classmethod
    def zero(cls, shape: HeadsShape, top: int, device: torch.device) -> Score:
        """Return a score whose sums are all 0, for R = `top` guesses per head."""
        hits_KR = torch.zeros(shape.num_heads, top, dtype=torch.int64, device=device)
        counts_K = torch.zeros_like(hits_KR[:, 0])
        tokens_V = counts_K.new_zeros(shape.vocab_size)
        return cls(counts_K.double(), hits_KR, counts_K, tokens_V, counts_K.clone())

    def add(self, other: Score) -> None:
        """Add the sums of another score to this one, in place."""
        for sums, more in zip(self, other, strict=True):
            sums += more


class _Guesses(NamedTuple):
    """One head's guesses for a chunk of its labelled rows."""

    head: int
    rows_C: Tensor
    logits_CV: Tensor
    labels_C: Tensor  # as rows of the lm_head; -100 outside the draft vocabulary
    hits_CR: Tensor  # bool: whether a guess is the label


@torch.no_grad()
def score_guesses(
    heads: Heads,
    hidden_ND: Tensor,
    next_N: Tensor,
    labels_KN: Tensor,
    top: int,
    rows: Rows | None = None,
) -> Score:
    """Sum the losses of K draft heads, and count labels among their first 1, 2, …, `top` guesses.

    The tensors and `rows` are those of `Heads.states`. Losses are computed in fp32 and added up in
    fp64.
    """
    total = Score.zero(heads.shape, top, hidden_ND.device)
    first_N = heads.vocabulary.rows_of_labels(labels_KN[0])
    first_N = first_N[first_N != IGNORED]
    total.tokens_V.index_add_(0, first_N, torch.ones_like(first_N))
    total.drafted_K.add_(heads.vocabulary.num_learned(labels_KN))
    for guesses in _guess_labels(heads, hidden_ND, next_N, labels_KN, top, rows):
        logits_CV = guesses.logits_CV.float()
        total.losses_K[guesses.head] += cross_entropy(
            logits_CV, guesses.labels_C, ignore_index=IGNORED, reduction="sum"
        )
        total.hits_KR[guesses.head, : guesses.hits_CR.shape[1]] += guesses.hits_CR.sum(0)
        total.counts_K[guesses.head] += len(guesses.rows_C)
    return total._replace(hits_KR=total.hits_KR.cumsum(1))


@torch.no_grad()
def label_ranks(
    heads: Heads,
    hidden_ND: Tensor,
    next_N: Tensor,
    labels_KN: Tensor,
    top: int,
    rows: Rows | None = None,
) -> Tensor:
    """Return the 0-based rank of each label among its head's `top` guesses, uint8 [K, N].

    The tensors and `rows` are those of `Heads.states`. The rank is `MISS` if the label is not among
    the guesses, and `NO_LABEL` for a label of -100.
    """
    ranks_KN = torch.full(labels_KN.shape, NO_LABEL, dtype=torch.uint8, device=hidden_ND.device)
    for guesses in _guess_labels(heads, hidden_ND, next_N, labels_KN, top, rows):
        ranks_C = torch.where(guesses.hits_CR.any(1), guesses.hits_CR.int().argmax(1), MISS)
        ranks_KN[guesses.head, guesses.rows_C] = ranks_C.to(torch.uint8)
    return ranks_KN


def _guess_labels(
    heads: Heads,
    hidden_ND: Tensor,
    next_N: Tensor,
    labels_KN: Tensor,
    top: int,
    rows: Rows | None,
) -> Iterator[_Guesses]:
    """Yield each draft head's guesses for its labelled rows, in chunks of rows.

    Guesses and labels are compared as rows of the lm_head. With a draft vocabulary, these are not
    token ids, and a label outside the draft vocabulary is -100.
    """
    states_KND = heads.states(hidden_ND, next_N, labels_KN, rows)
    lm_head_rows_KN = heads.vocabulary.rows_of_labels(labels_KN)
    num_rows = max(1, RANKED_BYTES // (heads.shape.vocab_size * states_KND.element_size()))
    for head, labels_N in enumerate(labels_KN):
        weight_VD = heads.lm_head_of(head).to(states_KND.dtype)
        labelled_rows = (labels_N != IGNORED).nonzero()[:, 0]
        for rows_C in labelled_rows.split(num_rows):
            logits_CV = states_KND[head, rows_C] @ weight_VD.t()
            guesses_CR = logits_CV.topk(min(top, logits_CV.shape[1])).indices
            labels_C = lm_head_rows_KN[head, rows_C]
            hits_CR = guesses_CR == labels_C[:, None]
            yield _Guesses(head, rows_C, logits_CV, labels_C, hits_CR)
