from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.heads.accuracy import MISS, NO_LABEL, label_ranks, score_guesses
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.heads.plain_loss import plain_summed_cross_entropy

NUM_HEADS, NUM_ROWS, SIZE, VOCAB = 3, 29, 8, 13
NEXT = torch.zeros(NUM_ROWS, dtype=torch.int64)  # which these heads do not read


def case(lm_head: str = "untied") -> tuple[MedusaHeads, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Build heads, and the states, next tokens and labels that score them."""
    generator = torch.Generator().manual_seed(2)
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, NUM_HEADS, 1, lm_head))
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    labels = torch.randint(VOCAB, (NUM_HEADS, NUM_ROWS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = IGNORED
    return heads, torch.randn(NUM_ROWS, SIZE, generator=generator), NEXT, labels


@pytest.mark.parametrize("lm_head", ["untied", "shared", "tied"])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * VOCAB * 4, 1 << 20])
@pytest.mark.parametrize("top", [5, VOCAB + 2])
def test_ranks_hits_and_losses_follow_from_the_logits(lm_head, chunk_bytes, top, monkeypatch):
    monkeypatch.setattr("pipeline.heads.accuracy.RANKED_BYTES", chunk_bytes)
    heads, hidden, _, labels = text = case(lm_head)
    ranks_KN = label_ranks(*text, top)
    found = score_guesses(*text, top)
    logits_KNV = heads(hidden)
    for k, n in np.ndindex(*labels.shape):
        expected = NO_LABEL
        if labels[k, n] != IGNORED:
            rank = int((logits_KNV[k, n] > logits_KNV[k, n, labels[k, n]]).sum())
            expected = rank if rank < top else MISS
        assert ranks_KN[k, n] == expected
    spans = np.array([0]), np.array([0]), np.array([False])
    hits_KR, counts_K = HeldOutRanks(ranks_KN.numpy(), *spans).guess_hits(top)
    assert found.hits_KR.tolist() == hits_KR.cumsum(1).tolist()
    assert found.counts_K.tolist() == counts_K.tolist()
    losses = plain_summed_cross_entropy(heads.hidden(hidden), heads.lm_head, labels)
    torch.testing.assert_close(found.losses_K.float(), losses.detach())


def test_losses_of_heads_in_half_precision_are_in_fp32():
    """Heads of zeros give each of 13 tokens the same logit, and log 13 is no number of bfloat16."""
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, NUM_HEADS), dtype=torch.bfloat16)
    labels = torch.zeros(NUM_HEADS, 1, dtype=torch.int64)
    found = score_guesses(heads, torch.zeros(1, SIZE), NEXT[:1], labels, 5)
    assert found.losses_K.tolist() == pytest.approx([math.log(VOCAB)] * NUM_HEADS, rel=1e-6)
