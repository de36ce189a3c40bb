from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.artifacts.feature_rows import FEATURES, FeatureRows, StateFormat
from pipeline.conversations.spans import IGNORED, Span, feature_positions, head_labels
from pipeline.storage.shards import ShardTask, ShardWriter, read_rows

V, D, K, FINGERPRINT = 40, 32, 3, "f" * 64


def open_rows(*shards: str | Path, roles=("assistant",)):
    return FeatureRows(
        tuple(map(str, shards)),
        fingerprint=FINGERPRINT,
        num_heads=K,
        roles=roles,
    )


def write(path: Path, groups: list[list[dict]]) -> Path:
    footer = StateFormat(torch.float32, D).footer
    task = ShardTask(0, path, path.with_suffix(".q"), FINGERPRINT)
    with ShardWriter(task, FEATURES, footer=footer) as writer:
        for group in groups:
            writer.write(group)
        writer.commit("features", None)
    return path


def row(name: str, spans: list[Span], seed: int = 0) -> dict:
    num_tokens = max(span.end for span in spans)
    random = torch.Generator().manual_seed(seed)
    positions = feature_positions(spans)
    hidden = torch.randn(len(positions), D, generator=random)
    return {
        "id": name,
        "parent_id": name,
        "split": "train",
        "input_ids": torch.randint(0, V, (num_tokens,), generator=random).tolist(),
        "spans": [vars(span) for span in spans],
        "positions": positions,
        "hidden": hidden.view(torch.uint8).numpy().tobytes(),
    }


@pytest.mark.parametrize("roles", [("assistant",), ("assistant", "user"), ("user",)])
def test_states_and_labels_come_back_as_they_were_written(shards, roles):
    rows = open_rows(*shards, roles=roles)
    written = [found for path in shards for found in read_rows(Path(path))]
    lengths = [rows.lengths(split) for split in ("train", "calibrate")]
    seen = 0
    for group in range(len(lengths[0])):
        opened = rows.read_group(group)
        for index in range(len(lengths[0][group])):
            expected, found = written[seen], opened[index]
            spans = [Span(**span) for span in expected["spans"]]
            labels_KN = head_labels(expected["input_ids"], spans, K, roles)
            keep = (labels_KN != IGNORED).any(0)
            assert found.hidden_ND.numpy().tobytes() == expected["hidden"]
            assert np.array_equal(found.labels_KN, labels_KN[:, keep])
            following = [t for span in spans for t in expected["input_ids"][span.start : span.end]]
            assert np.array_equal(found.next_N, np.array(following)[keep])
            assert found.learnable.tolist() == np.flatnonzero(keep).tolist()
            of_train, of_held_out = (by_split[group][index] for by_split in lengths)
            assert (of_train, of_held_out)[expected["split"] == "calibrate"] == keep.sum()
            assert (of_train, of_held_out)[expected["split"] == "train"] == 0
            seen += 1
    assert seen == len(written) == 30


def test_a_label_is_taught_by_the_state_that_predicts_it(tmp_path):
    """Head k's label at position t is the token at t+2+k, which the target predicted from its state
    at t+1+k.
    """
    spans = [Span(2, 5, "assistant"), Span(7, 12, "assistant"), Span(12, 13, "assistant")]
    found = open_rows(write(tmp_path / "0.parquet", [[row("a", spans)]])).read_group(0)[0]
    positions = feature_positions(spans).tolist()
    for start, stop in ((0, 6), (1, 3), (4, 6)):
        states_MD, rows_KN = found.teachers(start, stop)
        for k in range(K):
            for n, place in enumerate(found.learnable[start:stop].tolist()):
                label, taught_by = found.labels_KN[k, start + n], rows_KN[k, n]
                if label == IGNORED:
                    assert taught_by == -1
                else:
                    expected = found.hidden_ND[positions.index(positions[place] + 1 + k)]
                    assert torch.equal(states_MD[taught_by], expected)
