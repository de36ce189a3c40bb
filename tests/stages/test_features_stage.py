"""One cached state per target-written token: the state that its lm_head read to predict it."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.artifacts import feature_writer
from pipeline.errors import EnvironmentFault
from pipeline.stages import features as features_stage
from pipeline.storage.shards import open_shard
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import context_of, latest, quarantined, run_again, stages_run, stored


@pytest.fixture(scope="module")
def model(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cached(finished_run) -> list[dict]:
    return stored(finished_run.latest("features"))


def states(row: dict, column: str = "hidden") -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(row[column], np.float32).reshape(-1, 64).copy())


def test_rows_keep_their_order_ids_and_tokens(finished_run, cached):
    shared = ("id", "parent_id", "split", "input_ids", "spans")
    generated = stored(finished_run.latest("generate"))
    assert [[row[key] for key in shared] for row in cached] == [
        [row[key] for key in shared] for row in generated
    ]


@torch.inference_mode()
def test_states_predict_exactly_the_tokens_of_greedy_rows(cached, model):
    """States are of each row alone after the final norm, one before each target-written token."""
    for row in cached:
        targets = [at for span in row["spans"] for at in range(span["start"], span["end"])]
        assert row["positions"] == [at - 1 for at in targets]
        assert len(states(row)) == len(targets)
        if row["split"] != "train":
            written = [row["input_ids"][at] for at in targets]
            assert model.lm_head(states(row)).argmax(-1).tolist() == written
    for row in cached[::7]:
        hidden_TD = model.model(torch.tensor([row["input_ids"]])).last_hidden_state[0]
        torch.testing.assert_close(states(row), hidden_TD[row["positions"]], atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_row_features_are_the_layers_outputs_at_every_token(
    copied_run, make_config, tmp_path, model, cached
):
    settings = {"train__heads": "eagle3", "train__eagle3__layers": [1, 2]}
    run = run_again(make_config(tmp_path, **settings), until="row-features")
    assert stages_run(run) == ["row-features"], "other heads' features are kept"
    stage = latest(run, "row-features")
    rows = stored(stage)
    assert [row["id"] for row in rows] == [row["id"] for row in cached]
    assert stage.summary["positions"] == sum(len(row["input_ids"]) for row in rows)
    assert stage.summary["bytes_per_position"] > 2 * 64 * 4
    for row in rows[::7]:
        ids_1T = torch.tensor([row["input_ids"]])
        _, first, last = model(ids_1T, output_hidden_states=True).hidden_states
        close = functools.partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
        close(states(row, "layer_1"), first[0])
        close(model.model.norm(states(row, "layer_2")), last[0])


def test_row_features_are_named_by_their_layers(make_config, tmp_path):
    names = []
    for layers in ([1], [1, 2]):
        settings = {"train__heads": "eagle3", "train__eagle3__layers": layers}
        context = context_of(make_config(tmp_path, **settings))
        names.append(features_stage.ROWS.identity(context))
    assert names[0] != names[1]


def test_the_footer_describes_the_states(finished_run):
    stage = finished_run.latest("features")
    for path in stage.shards():
        with open_shard(path) as shard:
            footer = shard.schema_arrow.metadata
        assert (footer[b"dtype"], footer[b"hidden_size"]) == (b"float32", b"64")
        assert footer[b"fingerprint"] == stage.fingerprint.encode()
        assert footer[b"tap"] == b"last hidden state after the final norm"


class NotFinite:
    """An engine that makes NaN of one row's states and infinity of another's."""

    def __init__(self, engine, bad: dict[tuple[int, ...], float]):
        self.engine, self.dtype, self.hidden_size = engine, engine.dtype, engine.hidden_size
        self.bad, self.close = bad, engine.close

    def stream(self, rows):
        rows = list(rows)
        for index, hidden_TD in self.engine.stream(rows):
            hidden_TD = hidden_TD.clone()
            value = self.bad.get(tuple(rows[index]))
            if value is not None:
                hidden_TD[-3] = value
            yield index, hidden_TD


def test_a_row_with_states_that_are_not_finite_is_quarantined(
    copied_run, make_config, tmp_path, monkeypatch, cached
):
    """And its neighbours are not, also in small row groups."""
    bad = {tuple(cached[3]["input_ids"]): torch.nan, tuple(cached[20]["input_ids"]): torch.inf}
    names, make = [cached[3]["id"], cached[20]["id"]], features_stage.make_feature_engine
    monkeypatch.setattr(
        features_stage, "make_feature_engine", lambda *given: NotFinite(make(*given), bad)
    )
    monkeypatch.setattr(feature_writer, "ROW_GROUP_BYTES", 20_000)
    run = run_again(make_config(tmp_path), fresh="features", until="features")
    stage = latest(run, "features")
    kept, refused = stored(stage), quarantined(stage)
    assert kept == [row for row in cached if row["id"] not in names]
    assert [(row["id"], row["reason"]) for row in refused] == [(n, "non-finite") for n in names]
    assert refused[0]["row"]["input_ids"] == cached[3]["input_ids"]
    positions = sum(len(row["positions"]) for row in kept)
    assert (stage.summary["quarantined"], stage.summary["positions"]) == (2, positions)
    with open_shard(stage.shards()[0]) as shard:
        assert shard.num_row_groups > 1


def test_an_abandoned_shard_ends_its_stream(copied_run, make_config, tmp_path, monkeypatch):
    """An engine would go on with its rows among those of the next shard."""
    make, ended = features_stage.make_feature_engine, []

    class Watched(NotFinite):
        def stream(self, rows):
            try:
                yield from self.engine.stream(rows)
            finally:
                ended.append(True)

    def full(*_):
        raise EnvironmentFault("The disk is full.")

    engine = functools.partial(Watched, bad={})
    monkeypatch.setattr(features_stage, "make_feature_engine", lambda *given: engine(make(*given)))
    monkeypatch.setattr(features_stage.FeatureWriter, "put", full)
    with pytest.raises(EnvironmentFault, match="disk is full"):
        run_again(make_config(tmp_path), fresh="features", until="features")
    assert ended and not list(tmp_path.rglob("*.parquet.*"))


def test_a_tuned_backbone_s_states_are_named_by_its_content(make_config, tmp_path):
    context, names = context_of(make_config(tmp_path)), []
    for content in ("old", "new"):  # of one size
        train = StageDirectory(tmp_path / content, "train", "a" * 64)
        (train.path / "backbone").mkdir(parents=True)
        (train.path / "backbone" / "model.safetensors").write_text(content)
        train.finish({}, {})
        context.upstream["train"] = train
        names.append(features_stage.identity(context, tuned=True))
    assert names[0] != names[1]
