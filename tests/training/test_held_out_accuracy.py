from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pipeline.artifacts.trained_heads import write_heads
from pipeline.conversations.spans import IGNORED
from pipeline.storage.shards import read_rows
from pipeline.training import held_out_accuracy as room
from pipeline.training.heads_only import HeadsLearner, open_features
from pipeline.training.held_out_accuracy import HeldOutText, held_out_ranks
from pipeline.training.task import TrainSpec
from tests.training.trainings import trainer_of


@pytest.fixture
def learner(make_spec) -> HeadsLearner:
    """Heads that are neither the target's nor trained, so that their ranks are mixed."""
    learner = trainer_of(make_spec(batch_tokens=16)).learner
    draw = torch.Generator().manual_seed(0)
    torch.nn.init.normal_(learner.heads.block_weight, generator=draw)
    return learner


@pytest.fixture
def text(learner) -> HeldOutText:
    spec: TrainSpec = learner.spec
    write_heads(spec.heads_path, learner.heads, {})
    return HeldOutText(spec.shards, spec.fingerprint, str(spec.heads_path), ("assistant",))


@dataclass
class Expected:
    """Head k's mean loss, its hits within the first 1 … 5 guesses, its labels."""

    loss: float
    hits: list[int]
    count: int


@torch.no_grad()
def by_definition(learner: HeadsLearner, k: int) -> Expected:
    """Head k's figures, one position at a time."""
    losses, hits = [], [0] * 5
    for group, lengths in enumerate(learner.rows.lengths("calibrate")):
        for index in lengths.nonzero()[0]:
            row = learner.rows.read_group(group)[index]
            states_ND = row.hidden_ND[row.learnable]
            for state_D, label in zip(states_ND, row.labels_KN[k], strict=True):
                if label != IGNORED:
                    logits_V = learner.heads(state_D[None])[k, 0]
                    losses.append(float(torch.logsumexp(logits_V, 0) - logits_V[label]))
                    for rank in range(int((logits_V > logits_V[label]).sum()), 5):
                        hits[rank] += 1
    return Expected(sum(losses) / len(losses), hits, len(losses))


def test_held_out_figures_and_ranks_are_those_of_their_definition(learner, text):
    found = learner.evaluate()
    alone_KR, counts_K = held_out_ranks(text, 5).guess_hits(5)
    for k, head in enumerate(found.held_out):
        expected = by_definition(learner, k)
        shares = [hits / expected.count for hits in expected.hits]
        assert head["loss"] == pytest.approx(expected.loss, rel=1e-5)
        assert [head[f"top{r + 1}"] for r in range(5)] == pytest.approx(shares)
        assert alone_KR[k].cumsum().tolist() == expected.hits and counts_K[k] == expected.count


def test_spans_begin_where_the_target_began_to_write(text):
    lengths, conversations = [], []
    for shard in text.shards:
        for row in read_rows(shard):
            found = [
                span["end"] - span["start"] - 1
                for span in row["spans"]
                if span["role"] == "assistant" and span["end"] - span["start"] > 1
            ]
            if row["split"] == "calibrate" and found:
                lengths += found
                conversations.append(len(found))
    ranks = held_out_ranks(text, 5)
    assert np.diff(ranks.starts, append=len(ranks)).tolist() == lengths
    assert np.unique(ranks.conversations, return_counts=True)[1].tolist() == conversations


@pytest.mark.parametrize("limit", [1, 20])
def test_conversations_are_sampled_until_the_limit_is_reached(text, learner, monkeypatch, limit):
    monkeypatch.setattr(room, "MAX_POSITIONS", limit)
    found = held_out_ranks(text, 5)
    lengths = open_features(learner.spec).lengths("calibrate")
    longest = max(int(of_group.max(initial=0)) for of_group in lengths)
    assert limit <= len(found) < limit + longest
