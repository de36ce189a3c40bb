from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from pipeline.artifacts.trained_heads import write_heads
from pipeline.conversations.spans import IGNORED
from pipeline.storage.shards import read_rows
from pipeline.training import held_out_accuracy as room
from pipeline.training.heads_only import HeadsLearner, open_features
from pipeline.training.held_out_accuracy import Evaluation, HeldOutText, held_out_ranks
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
    return HeldOutText(spec.shards, spec.fingerprint, spec.heads_path, ("assistant",))


@torch.no_grad()
def by_definition(learner: HeadsLearner, k: int) -> tuple[float, list[int], int]:
    """Head k's mean loss, its hits within the first 1 … 5 guesses, and its labels."""
    states, labels = [], []
    for group, lengths in enumerate(learner.rows.lengths("calibrate")):
        for index in lengths.nonzero()[0]:
            row = learner.rows.read_group(group)[index]
            states.append(row.hidden_ND[row.learnable])
            labels.append(torch.from_numpy(row.labels_KN[k]).long())
    labels_N = torch.cat(labels)
    logits_NV = learner.heads(torch.cat(states))[k][labels_N != IGNORED]
    labels_N = labels_N[labels_N != IGNORED]
    ranks_N = (logits_NV > logits_NV.gather(1, labels_N[:, None])).sum(1)
    hits = [int((ranks_N <= rank).sum()) for rank in range(5)]
    return float(cross_entropy(logits_NV, labels_N)), hits, len(labels_N)


def test_held_out_figures_and_ranks_are_those_of_their_definition(learner, text):
    found = learner.evaluate()
    alone_KR, counts_K = held_out_ranks(text, 5).guess_hits(5)
    for k, head in enumerate(found.held_out):
        loss, hits, count = by_definition(learner, k)
        assert head["loss"] == pytest.approx(loss, rel=1e-5)
        shares = [head[f"top{r + 1}"] for r in range(5)]
        assert shares == pytest.approx([each / count for each in hits])
        assert alone_KR[k].cumsum().tolist() == hits and counts_K[k] == count


@pytest.mark.parametrize("seed", range(3))
def test_whole_rows_have_the_same_figures_packed_and_alone(make_spec, seed):
    spec = make_spec(heads="eagle3", batch_tokens=16)
    learner = trainer_of(spec).learner
    draw = torch.Generator().manual_seed(seed)
    for parameter in (learner.heads.o, learner.heads.down, learner.heads.lm_head):
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    write_heads(spec.heads_path, learner.heads, {})
    text = HeldOutText(
        spec.shards,
        spec.fingerprint,
        spec.heads_path,
        ("assistant",),
        row_shards=spec.row_shards,
        row_fingerprint=spec.row_fingerprint,
    )
    hits_KR, counts_K = held_out_ranks(text, 5).guess_hits(5)
    held_out = learner.evaluate().held_out
    assert len(hits_KR) == 2 * len(held_out) and hits_KR.any()
    for head, hits_R, count in zip(held_out, hits_KR, counts_K, strict=False):
        shares = [head[f"top{rank + 1}"] for rank in range(5)]
        assert shares == pytest.approx((hits_R.cumsum() / count).tolist())


def test_the_held_out_loss_weighs_each_head_by_its_decay():
    assert Evaluation([{"loss": 1.0}, {"loss": 3.0}], {}).loss(0.5) == 0.5 * 1 + 0.25 * 3
    assert Evaluation([], {}).loss(0.5) is None


def test_spans_begin_where_the_target_began_to_write(text):
    """Rows of one conversation have one number."""
    lengths, conversations = [], Counter()
    for shard in text.shards:
        for row in read_rows(shard):
            found = [
                span["end"] - span["start"] - 1
                for span in row["spans"]
                if span["role"] == "assistant" and span["end"] - span["start"] > 1
            ]
            if row["split"] == "calibrate" and found:
                lengths += found
                conversations[row["parent_id"]] += len(found)
    ranks = held_out_ranks(text, 5)
    assert np.diff(ranks.starts, append=len(ranks)).tolist() == lengths
    assert np.unique(ranks.conversations, return_counts=True)[1].tolist() == [
        *conversations.values()
    ]
    first, second = (set(half.conversations.tolist()) for half in ranks.conversation_halves())
    assert first and second and not first & second


@pytest.mark.parametrize("limit", [1, 20])
def test_conversations_are_sampled_until_the_limit_is_reached(text, learner, monkeypatch, limit):
    monkeypatch.setattr(room, "MAX_POSITIONS", limit)
    found = held_out_ranks(text, 5)
    lengths = open_features(learner.spec).lengths("calibrate")
    longest = max(int(of_group.max(initial=0)) for of_group in lengths)
    assert limit <= len(found) < limit + longest
