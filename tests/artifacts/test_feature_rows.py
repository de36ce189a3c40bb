from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.conversations.spans import IGNORED, Span, head_labels
from pipeline.storage.shards import read_rows
from tests.training.conftest import FINGERPRINT

K = 3


@pytest.mark.parametrize("roles", [("assistant",), ("assistant", "user"), ("user",)])
def test_states_and_labels_come_back_as_they_were_written(shards, roles):
    rows = FeatureRows(shards, fingerprint=FINGERPRINT, num_heads=K, roles=roles)
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
