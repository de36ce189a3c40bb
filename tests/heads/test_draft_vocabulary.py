"""Heads with a draft vocabulary equal heads whose other logits are -inf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from pipeline.artifacts.trained_heads import read_summary, read_trained_heads, write_heads
from pipeline.conversations.spans import IGNORED
from pipeline.decoding.dynamic_tree import NEVER, DynamicTree
from pipeline.decoding.tree import Tree, cartesian_tree
from pipeline.errors import DataError
from pipeline.heads.accuracy import MISS, NO_LABEL, label_ranks, score_guesses
from pipeline.heads.kind import TOKEN_MAP, Heads, most_frequent_tokens
from pipeline.heads.losses import TargetHead, Teacher
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import MedusaShape, RecurrentShape
from pipeline.training.held_out_accuracy import summarize_scores
from tests.heads.linear_heads import LinearHeads, LinearShape
from tests.heads.plain_loss import plain_summed_cross_entropy
from tests.heads.pruning import pruned

D, W, K, N, M = 8, 19, 3, 29, 31
TOKENS = [0, 2, 3, 7, 11, 12, 18]
OUTSIDE = [token for token in range(W) if token not in TOKENS]
WEIGHTS = torch.tensor([0.8, 0.5, 0.3], dtype=torch.float64)
OF_KIND = {
    "untied": (MedusaHeads, MedusaShape(D, W, K)),
    "shared": (MedusaHeads, MedusaShape(D, W, K, lm_head="shared")),
    "tied": (MedusaHeads, MedusaShape(D, W, K, lm_head="tied")),
    "recurrent": (RecurrentHeads, RecurrentShape(D, W, K, intermediate_size=5)),
    "linear": (LinearHeads, LinearShape(D, W, K)),  # knows nothing of draft vocabularies
}
every_kind = pytest.mark.parametrize("kind", OF_KIND)


def heads_of(kind: str) -> tuple[Heads, Heads]:
    """Build random heads, and the same heads with a draft vocabulary."""
    generator = torch.Generator().manual_seed(0)
    heads_class, shape = OF_KIND[kind]
    heads = heads_class(shape, dtype=torch.float64)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return heads, pruned(heads, TOKENS)


def text() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw states, next tokens and labels of any token."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(W, (K, N), generator=generator)
    for k in range(K):
        labels[k:, torch.rand(N, generator=generator) < 0.2] = IGNORED
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return hidden, torch.randint(W, (N,), generator=generator), labels


def masked_logits(whole: Heads, hidden, following, labels) -> torch.Tensor:
    logits = whole.states(hidden, following, labels) @ whole.lm_head.mT
    return logits.index_fill(2, torch.tensor(OUTSIDE), -torch.inf)


@given(st.lists(st.integers(0, 999), max_size=200), st.integers(1, 300))
def test_ties_among_the_most_frequent_go_to_the_lower_token(tokens: list[int], number: int):
    """At this vocabulary size, numpy's default sort does not keep the order of ties."""
    counts = np.bincount(tokens, minlength=1000)
    expected = sorted(range(1000), key=lambda token: (-counts[token], token))[:number]
    assert most_frequent_tokens(counts, number).tolist() == sorted(expected)


@every_kind
@pytest.mark.parametrize("share", [None, 0.4])
def test_losses_and_gradients_leave_the_other_tokens_out(kind: str, share: float | None):
    """The target's distribution is normalized over the draft vocabulary."""
    (whole, drafting), (hidden, following, labels) = heads_of(kind), text()
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(W + M, D, generator=generator).double()
    bias = torch.randn(W, generator=generator).double()
    head = TargetHead(weights[:W], bias)
    rows = torch.randint(-1, M, (K, N), generator=generator)
    teacher = share and Teacher(head, weights[W:], rows, share)
    loss, found = drafting.weighted_loss(hidden, following, labels, teacher, WEIGHTS)

    states, lm_head = whole.states(hidden, following, labels), whole.lm_head[..., TOKENS, :]
    row_of = torch.full((W + 1,), IGNORED)  # the last one is of -100
    row_of[TOKENS] = torch.arange(len(TOKENS))
    own = row_of[labels.where(labels != IGNORED, W)]
    if teacher:
        teacher = teacher._replace(head=TargetHead(weights[:W][TOKENS], bias[TOKENS]))
    expected = plain_summed_cross_entropy(states, lm_head, own, teacher)
    torch.testing.assert_close(found, expected)

    loss.backward()
    (WEIGHTS * expected).sum().backward()
    for name, weight in whole.named_parameters():
        if weight.requires_grad:
            gradient = weight.grad[..., TOKENS, :] if name == "lm_head" else weight.grad
            torch.testing.assert_close(drafting.get_parameter(name).grad, gradient)


@every_kind
def test_a_token_outside_is_a_miss_everywhere(kind: str, monkeypatch):
    monkeypatch.setattr("pipeline.heads.accuracy.RANKED_BYTES", 400)
    (whole, drafting), (hidden, following, labels) = heads_of(kind), text()
    ranks = label_ranks(drafting, hidden, following, labels, 4)
    logits = masked_logits(whole, hidden, following, labels)
    for k, n in np.ndindex(K, N):
        label, expected = int(labels[k, n]), NO_LABEL
        if label != IGNORED:
            rank = int((logits[k, n] > logits[k, n, label]).sum())
            expected = rank if label in TOKENS and rank < 4 else MISS
        assert ranks[k, n] == expected

    found = score_guesses(drafting, hidden, following, labels, 4)
    assert found.counts_K.tolist() == (labels != IGNORED).sum(1).tolist()
    assert found.hits_KR.T.tolist() == [(ranks <= r).sum(1).tolist() for r in range(4)]
    figures = summarize_scores(found)
    within_N = torch.isin(labels[0], torch.tensor(TOKENS))
    num_labels = int((labels[0] != IGNORED).sum())
    assert figures.draft_coverage == int(within_N.sum()) / num_labels < 1
    loss = cross_entropy(logits[0][within_N], labels[0][within_N])
    assert figures.held_out[0]["loss"] == pytest.approx(float(loss.detach()))


@every_kind
def test_proposed_is_as_if_the_other_tokens_never_were(kind: str):
    """Recurrent cells read the token that a row stands for."""
    (whole, drafting), (hidden, following, _) = heads_of(kind), text()
    tree = Tree(cartesian_tree((3, 2, 2)))
    proposed = drafting.propose(hidden, following, tree)
    for number, path in enumerate(tree.choices):
        state, token = hidden[:, None], following[:, None]
        for depth, rank in enumerate(path):
            state, logits = whole.expand(state, token, depth)
            masked = logits.index_fill(2, torch.tensor(OUTSIDE), -torch.inf)
            token = masked.argsort(2, descending=True)[..., rank]
        assert torch.equal(proposed[:, number], token[:, 0])

    grown = DynamicTree(20, 3, 4)
    tokens, *_ = grown.propose(drafting, hidden, following)
    assert torch.isin(tokens, torch.tensor(TOKENS)).all()
    inside = tokens[:, :1].T.contiguous()
    assert grown.places(drafting, hidden, following, inside)[0].max() < NEVER
    outside = torch.full_like(inside, OUTSIDE[0])
    assert grown.places(drafting, hidden, following, outside)[0].min() == NEVER


@pytest.mark.parametrize("kind", ["untied", "recurrent"])
def test_the_tokens_are_part_of_the_trained_heads_file(tmp_path, kind: str):
    path, (_, drafting) = tmp_path / "heads.safetensors", heads_of(kind)
    write_heads(path, drafting, {"steps": 7})
    found = read_trained_heads(path)
    assert found.shape == drafting.shape and read_summary(path, drafting.shape)
    assert found.vocabulary.token_map.tolist() == TOKENS
    losses = [each.weighted_loss(*text(), None, WEIGHTS)[1] for each in (found, drafting)]
    assert torch.equal(*losses)


@pytest.mark.parametrize(
    "wrong", [[*TOKENS[:-1], W], [*reversed(TOKENS)], [-1, *TOKENS[1:]], [0, *TOKENS[:-1]]]
)
def test_a_damaged_token_map_is_named(wrong: list[int]):
    _, drafting = heads_of("untied")
    tensors = drafting.stored_tensors() | {TOKEN_MAP: torch.tensor(wrong)}
    with pytest.raises(DataError, match="draft vocabulary"):
        MedusaHeads.from_named_tensors(drafting.shape, tensors)
