"""One cached state per target-written token: the very one that its lm_head read when it predicted
that token.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.artifacts import feature_writer
from pipeline.stages import features as features_stage
from pipeline.storage.shards import read_footer
from tests.flows.tiny import run_again, stored


@pytest.fixture(scope="module")
def model(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cached(finished_run) -> list[dict]:
    return stored(finished_run.latest("features"))


def states(row: dict, hidden_size: int = 64) -> torch.Tensor:
    return torch.from_numpy(
        np.frombuffer(row["hidden"], np.float32).reshape(-1, hidden_size).copy()
    )


def written(row: dict) -> list[int]:
    """The tokens that the target wrote."""
    return [
        token for span in row["spans"] for token in row["input_ids"][span["start"] : span["end"]]
    ]


def test_rows_keep_their_order_their_ids_and_what_was_generated(finished_run, cached):
    generated = stored(finished_run.latest("generate"))
    shared = ("id", "parent_id", "split", "input_ids", "spans")
    assert [[row[key] for key in shared] for row in cached] == [
        [row[key] for key in shared] for row in generated
    ]


def test_positions_are_those_before_each_target_written_token(cached):
    for row in cached:
        expected = [at - 1 for span in row["spans"] for at in range(span["start"], span["end"])]
        assert row["positions"] == expected
        assert len(states(row)) == len(expected) == len(written(row))


@torch.inference_mode()
def test_the_states_are_those_of_each_row_alone_after_the_final_norm(cached, model):
    for row in cached[::7]:
        hidden_TD = model.model(torch.tensor([row["input_ids"]])).last_hidden_state[0]
        torch.testing.assert_close(states(row), hidden_TD[row["positions"]], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_on_greedily_written_rows_the_lm_head_of_the_states_says_the_very_next_tokens(
    cached, model
):
    held_out = [row for row in cached if row["split"] != "train"]
    assert len(held_out) >= 15
    for row in held_out:
        assert model.lm_head(states(row)).argmax(-1).tolist() == written(row)


def test_the_footer_says_what_the_states_are(finished_run):
    stage = finished_run.latest("features")
    for path in stage.shards():
        footer = read_footer(path)
        assert (footer["dtype"], footer["hidden_size"]) == ("float32", "64")
        assert footer["fingerprint"] == stage.fingerprint
        assert footer["tap"] == "last hidden state after the final norm"


def test_a_row_whose_states_are_not_finite_is_quarantined_and_its_neighbours_are_not(
    copied_run, make_config, tmp_path, monkeypatch, cached
):
    bad = cached[3]["id"], cached[20]["id"]
    poisoned = [row["input_ids"] for row in cached if row["id"] in bad]
    real = features_stage.make_feature_engine

    class Poisoned:
        def __init__(self, engine):
            self.engine, self.dtype, self.hidden_size = engine, engine.dtype, engine.hidden_size

        def stream(self, rows):
            rows = list(rows)
            for index, hidden_TD in self.engine.stream(rows):
                if rows[index] in poisoned:
                    hidden_TD = hidden_TD.clone()
                    hidden_TD[-3] = torch.nan if rows[index] == poisoned[0] else torch.inf
                yield index, hidden_TD

        def close(self):
            self.engine.close()

    monkeypatch.setattr(
        features_stage, "make_feature_engine", lambda *arguments: Poisoned(real(*arguments))
    )
    config = make_config(tmp_path, features__codec="lz4")
    run = run_again(config, until="features")
    stage = run.latest("features")
    kept = stored(stage)
    assert kept == [row for row in cached if row["id"] not in bad]
    files = sorted((stage.path / "quarantine").iterdir())
    refused = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert [(row["id"], row["reason"]) for row in refused] == [(name, "non-finite") for name in bad]
    assert refused[0]["row"]["input_ids"] == poisoned[0] and "1 of" in refused[0]["detail"]
    positions = sum(len(row["positions"]) for row in kept)
    assert (stage.summary["quarantined"], stage.summary["positions"]) == (2, positions)


def test_small_row_groups_hold_the_same_rows(
    copied_run, make_config, tmp_path, monkeypatch, cached
):
    monkeypatch.setattr(feature_writer, "ROW_GROUP_BYTES", 20_000)
    config = make_config(tmp_path, features__codec="zstd")
    stage = run_again(config, until="features").latest("features")
    from pipeline.storage.shards import open_shard

    with open_shard(stage.shards()[0]) as shard:
        assert shard.num_row_groups > 1
    assert stored(stage) == cached
