from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.heads.accuracy import MISS, NO_LABEL, label_ranks, score
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.heads.plain_loss import plain_summed_cross_entropy

NUM_HEADS, NUM_ROWS, SIZE, VOCAB = 3, 29, 8, 13
NEXT = torch.zeros(NUM_ROWS, dtype=torch.int64)  # which these heads do not read


def case(lm_head: str) -> tuple[MedusaHeads, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, NUM_HEADS, 1, lm_head))
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    labels = torch.randint(VOCAB, (NUM_HEADS, NUM_ROWS), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = IGNORED
    return heads, torch.randn(NUM_ROWS, SIZE, generator=generator), labels


@pytest.mark.parametrize("lm_head", ["untied", "shared", "tied"])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * VOCAB * 4, 1 << 20])
def test_hits_count_labels_above_which_fewer_than_r_tokens_stand(lm_head: str, chunk_bytes: int):
    heads, hidden, labels = case(lm_head)
    _, hits, counts, *_ = score(heads, hidden, NEXT, labels, 5, chunk_bytes=chunk_bytes)
    logits = heads(hidden)
    for k in range(NUM_HEADS):
        rows = [n for n in range(NUM_ROWS) if labels[k, n] != IGNORED]
        ranks = [int((logits[k, n] > logits[k, n, labels[k, n]]).sum()) for n in rows]
        assert counts[k] == len(rows)
        assert hits[k].tolist() == [sum(rank <= r for rank in ranks) for r in range(5)]


@pytest.mark.parametrize("lm_head", ["untied", "shared", "tied"])
@pytest.mark.parametrize("chunk_bytes", [1, 4 * VOCAB * 4, 1 << 20])
def test_losses_are_the_summed_cross_entropy(lm_head: str, chunk_bytes: int):
    heads, hidden, labels = case(lm_head)
    losses, *_ = score(heads, hidden, NEXT, labels, 5, chunk_bytes=chunk_bytes)
    expected = plain_summed_cross_entropy(heads.hidden(hidden), heads.lm_head, labels)
    torch.testing.assert_close(losses.float(), expected.detach())


def test_under_autocast_losses_stay_within_the_rounding_of_its_dtype():
    heads, hidden, labels = case("untied")
    with torch.autocast("cpu", torch.bfloat16):
        found = score(heads, hidden, NEXT, labels, 5)
    exact = score(heads, hidden, NEXT, labels, 5)
    torch.testing.assert_close(found.losses_K, exact.losses_K, rtol=2e-2, atol=0)
    assert not torch.equal(found.losses_K, exact.losses_K)


def test_losses_of_heads_in_half_precision_are_in_fp32():
    """Heads of zeros give each of 13 tokens the same logit, and log 13 is no number of bfloat16."""
    heads = MedusaHeads(MedusaShape(SIZE, VOCAB, NUM_HEADS), dtype=torch.bfloat16)
    labels = torch.zeros(NUM_HEADS, 1, dtype=torch.int64)
    found = score(heads, torch.zeros(1, SIZE), NEXT[:1], labels, 5)
    assert found.losses_K.tolist() == pytest.approx([math.log(VOCAB)] * NUM_HEADS, rel=1e-6)


def test_ranks_say_of_every_label_where_it_stands_and_give_the_hits_that_the_score_counts():
    heads, hidden, labels = case("untied")
    ranks_KN = label_ranks(heads, hidden, NEXT, labels, 5).numpy()
    logits_KNV = heads(hidden)
    for k, n in itertools.product(*map(range, labels.shape)):
        if labels[k, n] == IGNORED:
            assert ranks_KN[k, n] == NO_LABEL
            continue
        rank = int((logits_KNV[k, n] > logits_KNV[k, n, labels[k, n]]).sum())
        assert ranks_KN[k, n] == (rank if rank < 5 else MISS)
    alone_KR, counts_K = HeldOutRanks(
        ranks_KN, np.array([0]), np.array([0]), np.array([False])
    ).hits(5)
    found = score(heads, hidden, NEXT, labels, 5)
    assert (
        alone_KR.cumsum(1).tolist() == found.hits_KR.tolist()
        and counts_K.tolist() == found.counts_K.tolist()
    )


def test_every_label_is_hit_when_all_tokens_are_guessed():
    heads, hidden, labels = case("untied")
    _, hits, counts, *_ = score(heads, hidden, NEXT, labels, VOCAB + 2)
    assert hits[:, VOCAB - 1].tolist() == counts.tolist() == hits[:, -1].tolist()


def test_batches_add_up():
    heads, hidden, labels = case("untied")
    parts = [
        score(heads, hidden[rows], NEXT[rows], labels[:, rows], 4)
        for rows in (slice(0, 9), slice(9, None))
    ]
    for whole, *sums in zip(score(heads, hidden, NEXT, labels, 4), *parts, strict=True):
        torch.testing.assert_close(
            sum(sums), whole, rtol=1e-6, atol=1e-6
        )  # sums in float64 of losses in float32
