"""How often each head's i-th guess is right: what the report shows and the tree search reads (paper 2.3.3).

Counts are over labelled positions only and add up over batches and workers; accuracies are taken from the sums.

Letters: N rows, C rows of a chunk, D hidden size, V vocabulary, K heads, R ranks (guesses per head).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.medusa.heads import MedusaHeads
from pipeline.medusa.losses import IGNORED


@torch.no_grad()
def topk_hits(
    heads: MedusaHeads, hidden_ND: Tensor, labels_KN: Tensor, top: int, *, chunk_bytes: int = 256 << 20
) -> tuple[Tensor, Tensor]:
    """How many labels are among each head's first 1, 2, … `top` guesses.

    Returns cumulative hits [K, R] and numbers of labels [K], both int64. Guesses are ranked by the very `topk` that
    decoding uses. Logits of one head and at most `chunk_bytes` are held.
    """
    hidden_KND = heads.hidden(hidden_ND)
    vocab_size = heads.config.vocab_size
    num_rows = max(1, chunk_bytes // (vocab_size * hidden_KND.element_size()))
    hits_KR = torch.zeros(len(labels_KN), top, dtype=torch.int64, device=hidden_ND.device)
    for head, (hidden, labels_N) in enumerate(zip(hidden_KND, labels_KN, strict=True)):
        weight_VD = heads.lm_head if heads.config.tied else heads.lm_head[head]
        for rows_C in (labels_N != IGNORED).nonzero()[:, 0].split(num_rows):
            guesses_CR = (hidden[rows_C] @ weight_VD.t()).topk(min(top, vocab_size)).indices
            hits_R = (guesses_CR == labels_N[rows_C, None]).sum(0)
            hits_KR[head, : len(hits_R)] += hits_R
    return hits_KR.cumsum(1), (labels_KN != IGNORED).sum(1)


def rank_accuracies(hits_KR: Tensor, counts_K: Tensor) -> list[list[float]]:
    """a_k(i): the share of labels that head k's i-th guess alone hits, from cumulative hits; 0 without labels."""
    alone_KR = torch.diff(hits_KR.double(), dim=1, prepend=torch.zeros_like(hits_KR[:, :1], dtype=torch.float64))
    return (alone_KR / counts_K.clamp(min=1)[:, None]).tolist()
