from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.trained_heads import write_heads
from pipeline.conversations.spans import IGNORED
from pipeline.heads.medusa import MedusaHeads
from pipeline.storage.shards import read_rows
from pipeline.training import evaluation as room
from pipeline.training.evaluation import evaluate, held_out_ranks
from pipeline.training.heads_only import initial_heads, open_features
from pipeline.training.task import Workers


@pytest.fixture
def heads(make_spec) -> MedusaHeads:
    """Heads that are neither the target's nor trained, so that their ranks are mixed."""
    heads = initial_heads(make_spec())
    torch.nn.init.normal_(heads.block_weight, generator=torch.Generator().manual_seed(0))
    return heads


@torch.no_grad()
def by_definition(
    heads: MedusaHeads, rows: FeatureRows, split: str
) -> tuple[list[float], list[list[int]], list[int]]:
    """Each head's mean loss, its hits within the first 1 … 5 guesses, and its labels: one position
    at a time.
    """
    losses, hits, counts = [], [[0] * 5 for _ in range(3)], [0] * 3
    for k in range(3):
        total = 0.0
        for group, lengths in enumerate(rows.lengths(split)):
            for index in lengths.nonzero()[0]:
                row = rows.read_group(group)[index]
                for state_D, label in zip(
                    row.hidden_ND[row.learnable], row.labels_KN[k], strict=True
                ):
                    if label == IGNORED:
                        continue
                    logits_V = heads(state_D[None])[k, 0]
                    rank = int((logits_V > logits_V[label]).sum())
                    total += float(torch.logsumexp(logits_V, 0) - logits_V[label])
                    counts[k] += 1
                    for r in range(rank, 5):
                        hits[k][r] += 1
        losses.append(total / counts[k])
    return losses, hits, counts


def test_held_out_figures_are_those_of_their_definition(heads, make_spec):
    rows = open_features(make_spec())
    losses, hits, counts = by_definition(heads, rows, "calibrate")
    found = evaluate(heads, rows, Workers(), batch_tokens=16, dtype=torch.float32)
    for k, head in enumerate(found["held_out"]):
        assert head["loss"] == pytest.approx(losses[k], rel=1e-5)
        assert [head[f"top{r + 1}"] for r in range(5)] == pytest.approx(
            [hit / counts[k] for hit in hits[k]]
        )


def test_guessing_by_frequency_is_right_as_often_as_the_most_frequent_tokens_occur(
    heads, make_spec
):
    rows = open_features(make_spec())
    found = evaluate(heads, rows, Workers(), batch_tokens=16, dtype=torch.float32)["frequency"]
    labels = Counter()
    for group, lengths in enumerate(rows.lengths("calibrate")):
        for index in lengths.nonzero()[0]:
            labels.update(rows.read_group(group)[index].labels_KN[0].tolist())
    hits = np.cumsum([hits for _, hits in labels.most_common(5)])
    assert list(found.values()) == pytest.approx((hits / labels.total()).tolist())
    assert list(found) == ["top1", "top2", "top3", "top4", "top5"]


def test_the_tree_search_gets_the_same_counts_from_the_saved_heads(heads, make_spec, tmp_path):
    spec = make_spec()
    write_heads(tmp_path / "heads.safetensors", heads, {})
    _, hits, counts = by_definition(heads, open_features(spec), "calibrate")
    path = str(tmp_path / "heads.safetensors")
    found = held_out_ranks(spec.shards, spec.fingerprint, path, ("assistant",), 5, "cpu")
    alone_KR, counts_K = found.hits(5)
    assert alone_KR.cumsum(1).tolist() == hits and counts_K.tolist() == counts


def test_spans_begin_where_the_target_began_to_write(heads, make_spec, tmp_path):
    spec = make_spec()
    write_heads(tmp_path / "heads.safetensors", heads, {})
    path = str(tmp_path / "heads.safetensors")
    found = held_out_ranks(spec.shards, spec.fingerprint, path, ("assistant",), 5, "cpu")
    rows = [row for shard in spec.shards for row in read_rows(shard) if row["split"] == "calibrate"]
    lengths = [
        span["end"] - span["start"] - 1
        for row in rows
        for span in row["spans"]
        if span["role"] == "assistant"
    ]
    assert np.diff(found.starts, append=len(found)).tolist() == [
        length for length in lengths if length
    ]
    spans = [
        sum(s["end"] - s["start"] > 1 and s["role"] == "assistant" for s in row["spans"])
        for row in rows
    ]
    assert np.unique(found.conversations, return_counts=True)[1].tolist() == [
        number for number in spans if number
    ]


def test_a_sample_of_the_positions_is_enough_and_always_the_same(heads, make_spec, monkeypatch):
    rows = open_features(make_spec())
    whole = evaluate(heads, rows, Workers(), batch_tokens=16, dtype=torch.float32)
    monkeypatch.setattr(room, "MAX_POSITIONS", 20)
    one, other = (
        evaluate(heads, rows, Workers(), batch_tokens=size, dtype=torch.float32) for size in (20, 7)
    )
    assert [head["top5"] for head in one["held_out"]] == [
        head["top5"] for head in other["held_out"]
    ]
    assert one != whole


@pytest.mark.parametrize("limit", [1, 20])
def test_conversations_are_sampled_until_the_limit_is_reached(
    heads, make_spec, tmp_path, monkeypatch, limit
):
    spec, path = make_spec(), tmp_path / "heads.safetensors"
    write_heads(path, heads, {})
    monkeypatch.setattr(room, "MAX_POSITIONS", limit)
    found = held_out_ranks(spec.shards, spec.fingerprint, str(path), ("assistant",), 5, "cpu")
    longest = max(
        int(lengths.max(initial=0)) for lengths in open_features(spec).lengths("calibrate")
    )
    assert limit <= len(found) < limit + longest


def test_without_held_out_rows_there_are_no_figures(heads, make_spec, monkeypatch):
    monkeypatch.setattr(room, "SPLIT", "nothing")
    found = evaluate(
        heads, open_features(make_spec()), Workers(), batch_tokens=16, dtype=torch.float32
    )
    assert found == {"held_out": [], "frequency": {}}
