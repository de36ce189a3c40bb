"""Heads of both kinds learn from states of 8 bits what they learn from the target's own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.artifacts.feature_rows import StateFormat
from pipeline.artifacts.feature_writer import Backlog, FeatureWriter
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.storage.shards import ShardWriter, read_rows
from pipeline.training.trainer import train
from tests.training.conftest import FINGERPRINT, D


def requantized(shard: str, path: Path, precision) -> str:
    """A copy of a shard, its states stored in 8 bits."""
    states = StateFormat(torch.float32, D, precision)
    stored = list(read_rows(shard))
    rows = [TokenRow.of(row) for row in stored]
    opened = {"index": 0, "fingerprint": FINGERPRINT, "footer": states.footer}
    with (
        ShardWriter(path, path.with_suffix(".q"), states.schema, **opened) as writer,
        FeatureWriter(writer, rows, states, Backlog()) as features,
    ):
        for index, row in enumerate(stored):
            hidden_TD = torch.zeros(len(row["input_ids"]), D)
            hidden_TD[row["positions"]] = torch.from_numpy(
                np.frombuffer(row["hidden"], np.float32).reshape(-1, D).copy()
            )
            features.put(index, hidden_TD)
        features.commit("features", None).result()
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["medusa", "recurrent"])
def test_heads_of_both_kinds_learn_from_8_bits_what_they_learn_from_all(
    make_spec, shards, tmp_path, kind
):
    settings = {"heads": kind, "epochs": 5, "soft_labels": 0.3}
    found = {"native": train(make_spec("native", **settings)).held_out}
    for precision in ("fp8", "int8"):
        copies = tuple(
            requantized(shard, tmp_path / f"{precision}{i}.parquet", precision)
            for i, shard in enumerate(shards)
        )
        found[precision] = train(make_spec(precision, shards=copies, **settings)).held_out
        for head, native in zip(found[precision], found["native"], strict=True):
            assert head["loss"] == pytest.approx(native["loss"], rel=0.1, abs=0.05)
            assert head["loss"] != native["loss"], "its states are its own"
