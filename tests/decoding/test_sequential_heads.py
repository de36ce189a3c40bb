"""Exact decoding with a recurrent cell and with a draft vocabulary."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from pipeline.conversations.spans import IGNORED
from pipeline.decoding.decoder import Decoded
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.steps import last_positions
from pipeline.decoding.tree import cartesian_tree
from pipeline.heads.kind import TargetWeights
from pipeline.heads.recurrent import RecurrentHeads
from pipeline.heads.shapes import RecurrentShape
from tests.decoding.conftest import PROMPT, SIZE, VOCAB, endless
from tests.decoding.test_cuda_graphs import Tape
from tests.heads.pruning import pruned

TREES = [cartesian_tree((3, 2, 1)), ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)), DynamicTree(12, 4, 3)]
IDS = ["cartesian", "chain beyond training", "dynamic"]


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Use cache widths of 16 slots, so that texts outgrow several."""
    monkeypatch.setattr("pipeline.decoding.cache._GRANULE", 16)


def trained_cell(model: PreTrainedModel, ids: list[int]) -> RecurrentHeads:
    """Train a cell of three steps on one text."""
    states_ND, _ = last_positions(model, ids, len(ids))
    hidden, following = states_ND[:-2].clone(), torch.tensor(ids[1:-1])
    lm_head = model.get_output_embeddings().weight.detach()
    embedding = model.get_input_embeddings().weight.detach()
    torch.manual_seed(0)
    target = TargetWeights(lambda: lm_head, lambda: embedding)
    heads = RecurrentHeads.initial(RecurrentShape(SIZE, VOCAB, 3, 64), target)
    labels = torch.full((3, len(following)), IGNORED)
    for step in range(3):
        labels[step, : len(ids) - 2 - step] = torch.tensor(ids[2 + step :])
    optimizer = torch.optim.Adam(
        [weight for weight in heads.parameters() if weight.requires_grad], lr=1e-2
    )
    for _ in range(60):
        logits = heads.states(hidden, following, labels) @ heads.lm_head.T
        optimizer.zero_grad()
        cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    return heads


@pytest.fixture(scope="module")
def cell_pair(target_of, continuation):
    """Return a function of a family: a target and a cell trained on its answer to `PROMPT`."""
    made = {}

    def get(family: str) -> tuple[PreTrainedModel, RecurrentHeads]:
        if family not in made:
            model = target_of(family)
            made[family] = model, trained_cell(model, PROMPT + continuation(model, PROMPT, 30))
        return made[family]

    return get


def require_same_captured(model, heads, tree, prompts: list[list[int]]) -> list[Decoded]:
    """Decode with and without captured steps; return their common result."""
    expected = endless(model, heads, tree).generate_batch(prompts, 40)
    tape = Tape()
    captured = endless(model, heads, tree, graph_capture=tape)
    for _ in range(2):
        for one, same in zip(captured.generate_batch(prompts, 40), expected, strict=True):
            assert (one.token_ids, one.accepted) == (same.token_ids, same.accepted)
    assert tape.replayed > 5
    return expected


@pytest.mark.parametrize("tree", TREES, ids=IDS)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied-mixed-windows", "gemma2-both-windows"])
def test_text_is_what_transformers_writes(family, tree, cell_pair, continuation):
    model, heads = cell_pair(family)
    prompts = [PROMPT, PROMPT[:3]]
    decoded = require_same_captured(model, heads, tree, prompts)
    expected = [continuation(model, prompt, 40) for prompt in prompts]
    assert [one.token_ids for one in decoded] == expected
    assert max(decoded[0].accepted) >= 4, "three guesses in a row, at least once"


@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
def test_a_draft_vocabulary_keeps_the_text(kind, pair, cell_pair, continuation):
    """Two tokens of the text are never proposed."""
    model, heads = {"medusa": pair, "recurrent": cell_pair}[kind]("llama")
    expected = continuation(model, PROMPT, 40)
    outside = {token for token, _ in Counter(expected).most_common()[-2:]}
    drafting = pruned(heads, set(range(VOCAB)) - outside)
    for tree in (cartesian_tree((3, 2, 1)), DynamicTree(12, 3, 3)):
        (decoded,) = require_same_captured(model, drafting, tree, [PROMPT])
        assert decoded.token_ids == expected and max(decoded.accepted) >= 3
