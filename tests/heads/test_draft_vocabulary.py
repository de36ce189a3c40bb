"""Heads with a draft vocabulary: as if every other token's logit were -inf."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.trained_heads import read_summary, read_trained_heads, write_heads
from pipeline.conversations.spans import IGNORED
from pipeline.decoding.dynamic_tree import NEVER, DynamicTree
from pipeline.decoding.tree import Tree, cartesian_tree
from pipeline.errors import DataError
from pipeline.heads.accuracy import MISS, NO_LABEL, label_ranks, score
from pipeline.heads.kind import TOKEN_MAP, Heads, most_frequent
from pipeline.heads.kinds import KINDS
from pipeline.heads.losses import TargetHead, Teacher
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import MedusaShape, RecurrentShape
from pipeline.training.evaluation import evaluation_of
from tests.heads.linear_heads import LinearHeads, LinearShape
from tests.heads.pruning import pruned

D, W, K, N, M = 8, 19, 3, 29, 31
TOKENS = [0, 2, 3, 7, 11, 12, 18]
OUTSIDE = [token for token in range(W) if token not in TOKENS]
WEIGHTS = torch.tensor([0.8, 0.5, 0.3], dtype=torch.float64)
OF_KIND = {
    "untied": lambda: MedusaHeads(MedusaShape(D, W, K), dtype=torch.float64),
    "shared": lambda: MedusaHeads(MedusaShape(D, W, K, lm_head="shared"), dtype=torch.float64),
    "tied": lambda: MedusaHeads(MedusaShape(D, W, K, lm_head="tied"), dtype=torch.float64),
    "recurrent": lambda: RecurrentHeads(
        RecurrentShape(D, W, K, intermediate_size=5), dtype=torch.float64
    ),
    "a kind that knows nothing of it": lambda: LinearHeads(
        LinearShape(D, W, K), dtype=torch.float64
    ),
}
every_kind = pytest.mark.parametrize("kind", OF_KIND)


def heads_of(kind: str) -> tuple[Heads, Heads]:
    """Random heads, and the same with a draft vocabulary."""
    generator = torch.Generator().manual_seed(0)
    heads = OF_KIND[kind]()
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return heads, pruned(heads, TOKENS)


def text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, next tokens and labels of any token."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(W, (K, N), generator=generator)
    for k in range(K):
        labels[k:, torch.rand(N, generator=generator) < 0.2] = IGNORED
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return hidden, torch.randint(W, (N,), generator=generator), labels


def masked_logits(whole: Heads, hidden, following, labels) -> torch.Tensor:
    logits = whole.states(hidden, following, labels) @ whole.lm_head.mT
    return logits.index_fill(2, torch.tensor(OUTSIDE), -torch.inf)


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 10))
def test_the_most_frequent_tokens_of_equals_the_lower_in_any_order_of_the_text(
    tokens: list[int], number: int
):
    counts = Counter(tokens)
    expected = sorted(sorted(range(10), key=lambda token: (-counts[token], token))[:number])
    assert (
        most_frequent(np.array([counts[token] for token in range(10)]), number).tolist() == expected
    )


def test_ties_go_to_the_lower_token_in_a_large_vocabulary():
    """numpy's usual sort does not keep the order of equals."""
    assert most_frequent(np.arange(1000) % 7, 3).tolist() == [6, 13, 20]


@every_kind
@pytest.mark.parametrize("share", [None, 0.4])
def test_losses_and_gradients_are_those_of_the_other_tokens_logits_left_out(
    kind: str, share: float | None
):
    """And of the target's distribution over the draft vocabulary, made to sum to one again."""
    (whole, drafting), (hidden, following, labels) = heads_of(kind), text()
    generator = torch.Generator().manual_seed(2)
    head = TargetHead(
        torch.randn(W, D, generator=generator).double(),
        torch.randn(W, generator=generator).double(),
    )
    rows = torch.randint(-1, M, (K, N), generator=generator)
    teacher = share and Teacher(head, torch.randn(M, D, generator=generator).double(), rows, share)
    found = drafting.summed_losses(hidden, following, labels, teacher, WEIGHTS)

    log_q = masked_logits(whole, hidden, following, labels).log_softmax(2)
    learned = torch.isin(labels, torch.tensor(TOKENS))
    losses = -log_q.gather(2, labels.clamp(min=0)[..., None])[..., 0].where(learned, 0)
    if teacher:
        p = (teacher.states_MD @ head.weight_VD.T + head.bias_V).softmax(1)[:, TOKENS]
        p = p / p.sum(1, keepdim=True)
        soft = -(p[rows.clamp(min=0)] * log_q[..., TOKENS]).sum(2)
        losses = torch.where(learned & (rows >= 0), (1 - share) * losses + share * soft, losses)
    expected = losses.sum(1)
    torch.testing.assert_close(found, expected)

    (WEIGHTS * found).sum().backward()
    (WEIGHTS * expected).sum().backward()
    for name, weight in whole.named_parameters():
        if weight.requires_grad:
            gradient = weight.grad[..., TOKENS, :] if name == "lm_head" else weight.grad
            torch.testing.assert_close(drafting.get_parameter(name).grad, gradient)


@every_kind
def test_a_token_outside_is_a_miss_in_ranks_hits_and_guessing_by_frequency(kind: str):
    (whole, drafting), (hidden, following, labels) = heads_of(kind), text()
    ranks = label_ranks(drafting, hidden, following, labels, 4, chunk_bytes=400)
    logits = masked_logits(whole, hidden, following, labels)
    for k, n in np.ndindex(K, N):
        label = int(labels[k, n])
        rank = int((logits[k, n] > logits[k, n, max(label, 0)]).sum())
        expected = NO_LABEL if label == IGNORED else MISS if label in OUTSIDE or rank >= 4 else rank
        assert ranks[k, n] == expected

    found = score(drafting, hidden, following, labels, 4, chunk_bytes=400)
    assert found.counts_K.tolist() == (labels != IGNORED).sum(1).tolist()
    assert found.hits_KR.tolist() == [
        [int((ranks[k] <= r).sum()) for r in range(4)] for k in range(K)
    ]
    figures = evaluation_of(found)
    counts = Counter(labels[0][labels[0] != IGNORED].tolist())
    within = sorted((counts[token] for token in TOKENS), reverse=True)
    assert figures.frequency["top2"] == sum(within[:2]) / counts.total()
    assert figures.draft_coverage == sum(within) / counts.total() < 1
    log_q = logits[0].log_softmax(1)
    losses = [
        -float(log_q[n, label].detach())
        for n, label in enumerate(labels[0].tolist())
        if label in TOKENS
    ]
    assert figures.held_out[0]["loss"] == pytest.approx(sum(losses) / len(losses))


@every_kind
def test_proposed_is_what_would_be_if_the_other_tokens_never_were(kind: str):
    """Also where a guess leads to another one: cells read the token that is meant."""
    (whole, drafting), (hidden, following, _) = heads_of(kind), text()
    tree = Tree(cartesian_tree((3, 2, 2)))
    proposed = drafting.propose(hidden, following, tree)
    for number, path in enumerate(tree.choices):
        state, token = hidden[:, None], following[:, None]
        for depth, rank in enumerate(path):
            state, logits = whole.expand(state, token, depth)
            token = logits.index_fill(2, torch.tensor(OUTSIDE), -torch.inf).argsort(
                2, descending=True
            )[..., rank]
        assert torch.equal(proposed[:, number], token[:, 0])

    grown = DynamicTree(20, 3, 4)
    tokens, scores, *_ = grown.propose(drafting, hidden, following)
    assert torch.isin(tokens, torch.tensor(TOKENS)).all()
    probabilities = masked_logits(whole, hidden, following, text()[2])[0].softmax(1)
    torch.testing.assert_close(
        scores[:, :4].exp(), probabilities.gather(1, tokens[:, :4]).float(), rtol=2e-3, atol=0
    )
    labels = tokens[:, :1].T.contiguous()
    assert grown.places(drafting, hidden, following, labels)[0].max() < NEVER
    assert (
        grown.places(drafting, hidden, following, torch.full_like(labels, OUTSIDE[0]))[0].min()
        == NEVER
    )


@every_kind
def test_the_tokens_are_part_of_the_trained_heads_file(tmp_path, monkeypatch, kind: str):
    monkeypatch.setitem(KINDS, "linear", LinearHeads)
    _, drafting = heads_of(kind)
    write_heads(tmp_path / "heads.safetensors", drafting, {"steps": 7})
    found = read_trained_heads(tmp_path / "heads.safetensors")
    assert found.shape == drafting.shape and read_summary(
        tmp_path / "heads.safetensors", drafting.shape
    )
    assert found.vocabulary.token_map.tolist() == TOKENS
    hidden, following, labels = text()
    assert torch.equal(
        found.summed_losses(hidden, following, labels),
        drafting.summed_losses(hidden, following, labels),
    )
    with pytest.raises(DataError, match=r"vocabulary of 7 of the target's 19.* of 19"):
        read_summary(tmp_path / "heads.safetensors", drafting.shape.drafting(W))


@pytest.mark.parametrize(
    "wrong", [[*TOKENS[:-1], W], [*reversed(TOKENS)], [-1, *TOKENS[1:]], [0, *TOKENS[:-1]]]
)
def test_a_damaged_token_map_is_named(wrong: list[int]):
    _, drafting = heads_of("untied")
    tensors = drafting.stored_tensors() | {TOKEN_MAP: torch.tensor(wrong)}
    with pytest.raises(
        DataError, match="draft vocabulary is not 7 of the target's 19 tokens in order"
    ):
        MedusaHeads.from_named_tensors(drafting.shape, tensors)
