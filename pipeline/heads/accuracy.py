"""How good the heads' guesses are: what the report shows and the tree search reads (paper 2.3.3).

Sums are over labelled positions only and add up over batches and workers. Guesses are ranked by the
very `topk` that decoding uses; a head that reads tokens is given the true ones. A token outside the
draft vocabulary is a miss.

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
from pipeline.heads.shape import HeadsShape

MISS = 255  # the token is not among the guesses
RANKED_BYTES = 256 << 20  # of logits at a time
NO_LABEL = 254  # the span ends before it


class Score(NamedTuple):
    """Per head: the labels' summed cross entropy [K], cumulative hits of its guesses [K, R], number
    of labels [K].

    `tokens_V` [V]: how often each token that can be proposed is a label of head 0. `drafted_K` [K]:
    how many labels can be proposed, those that the cross entropy is summed over.
    """

    losses_K: Tensor
    hits_KR: Tensor
    counts_K: Tensor
    tokens_V: Tensor
    drafted_K: Tensor

    @classmethod
    def zero(cls, shape: HeadsShape, top: int, device: torch.device) -> Score:
        """Of no labels."""
        num_heads = shape.num_heads
        hits_KR = torch.zeros(num_heads, top, dtype=torch.int64, device=device)
        losses_K, counts_K = (
            hits_KR.new_zeros(num_heads, dtype=torch.float64),
            hits_KR.new_zeros(num_heads),
        )
        return cls(
            losses_K,
            hits_KR,
            counts_K,
            hits_KR.new_zeros(shape.vocab_size),
            torch.zeros_like(counts_K),
        )


@torch.no_grad()
def score(
    heads: Heads,
    hidden_ND: Tensor,
    next_N: Tensor,
    labels_KN: Tensor,
    top: int,
    *,
    chunk_bytes: int = RANKED_BYTES,
) -> Score:
    """The heads' loss, and how many labels are among each one's first 1, 2, … `top` guesses; see
    `Heads.states`.

    Losses are in fp32, their sums in fp64.
    """
    total = Score.zero(heads.shape, top, hidden_ND.device)
    drafted_KN = heads.vocabulary.rows(labels_KN)
    drafted_N = drafted_KN[0][drafted_KN[0] != IGNORED]
    total.tokens_V.index_add_(0, drafted_N, torch.ones_like(drafted_N))
    total.drafted_K.add_(heads.vocabulary.num_learned(labels_KN))
    for head, rows_C, logits_CV, hits_CR in _guesses(
        heads, hidden_ND, next_N, labels_KN, top, chunk_bytes
    ):
        summed = cross_entropy(
            logits_CV.float(), drafted_KN[head, rows_C], ignore_index=IGNORED, reduction="sum"
        )
        total.losses_K[head] += summed
        total.hits_KR[head, : hits_CR.shape[1]] += hits_CR.sum(0)
        total.counts_K[head] += len(rows_C)
    return total._replace(hits_KR=total.hits_KR.cumsum(1))


@torch.no_grad()
def label_ranks(
    heads: Heads,
    hidden_ND: Tensor,
    next_N: Tensor,
    labels_KN: Tensor,
    top: int,
    *,
    chunk_bytes: int = RANKED_BYTES,
) -> Tensor:
    """Where each label stands among its head's guesses, uint8 [K, N], 0 for the best; or `MISS` or
    `NO_LABEL`.
    """
    ranks_KN = torch.full(labels_KN.shape, NO_LABEL, dtype=torch.uint8, device=hidden_ND.device)
    for head, rows_C, _, hits_CR in _guesses(heads, hidden_ND, next_N, labels_KN, top, chunk_bytes):
        ranks_C = torch.where(hits_CR.any(1), hits_CR.int().argmax(1), MISS)
        ranks_KN[head, rows_C] = ranks_C.to(torch.uint8)
    return ranks_KN


def _guesses(
    heads: Heads, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor, top: int, chunk_bytes: int
) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(head, rows [C], logits [C, V], which guess is the label [C, R]) of the labelled, a head and
    chunk at a time.

    Products run in autocast's dtype where it is on.
    """
    states_KND, drafted_KN = (
        heads.states(hidden_ND, next_N, labels_KN),
        heads.vocabulary.rows(labels_KN),
    )
    num_rows = max(1, chunk_bytes // (heads.shape.vocab_size * states_KND.element_size()))
    for head, (states_ND, labels_N) in enumerate(zip(states_KND, labels_KN, strict=True)):
        weight_VD = heads.lm_head_of(head).to(states_ND.dtype)
        for rows_C in (labels_N != IGNORED).nonzero()[:, 0].split(num_rows):
            logits_CV = states_ND[rows_C] @ weight_VD.t()
            guesses_CR = logits_CV.topk(min(top, logits_CV.shape[1])).indices
            yield head, rows_C, logits_CV, guesses_CR == drafted_KN[head, rows_C, None]
