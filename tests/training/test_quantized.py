"""Training from states of 8 bits, and beside a quantized copy of the target."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from pipeline.artifacts.feature_rows import StateFormat
from pipeline.artifacts.feature_writer import Backlog, FeatureWriter
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.flow import run_flow
from pipeline.stages.train import QUANTIZED_TEACHER
from pipeline.storage.shards import ShardWriter, read_rows
from pipeline.training.trainer import train
from tests.flows.tiny import latest
from tests.targets.adapters import logits_with_adapter_on
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
            known = np.frombuffer(row["hidden"], np.float32).reshape(-1, D)
            hidden_TD[row["positions"]] = torch.from_numpy(known.copy())
            features.put(index, hidden_TD)
        features.commit("features", None).result()
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "precision"), [("medusa", "fp8"), ("recurrent", "int8")])
def test_heads_learn_from_8_bits_what_they_learn_from_all(
    make_spec, shards, tmp_path, kind, precision
):
    settings = {"heads": kind, "epochs": 5, "soft_labels": 0.3}
    expected = train(make_spec("native", **settings)).held_out
    copies = []
    for shard in shards:
        copies.append(requantized(shard, tmp_path / Path(shard).name, precision))
    found = train(make_spec(precision, shards=tuple(copies), **settings)).held_out
    for head, native in zip(found, expected, strict=True):
        assert head["loss"] == pytest.approx(native["loss"], rel=0.1, abs=0.05)
        assert head["loss"] != native["loss"], "its states are its own"


@pytest.mark.slow
def test_a_run_with_a_four_bit_copy_publishes_whole_weights(
    make_config, tmp_path, tiny_target, monkeypatch
):
    pytest.importorskip("bitsandbytes")
    loaded, load = [], AutoModelForCausalLM.from_pretrained

    def spy(name, *args, **settings):
        if settings.get("quantization_config") is not None:
            loaded.append(str(name))
        return load(name, *args, **settings)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    backbone = {
        "sequence_length": 96,
        "batch_sequences": 4,
        "micro_batch": 4,
        "lora_rank": 4,
        "lr": 0.05,
        "max_kl": 50.0,
        "quantization": "4bit",
    }
    config = make_config(
        tmp_path, train__method="medusa-2", train__backbone=backbone, check__prompts=4
    )
    printed = StringIO()
    run = run_flow(config, executor="inline", console=Console(file=printed))
    assert loaded == [str(tiny_target)]
    assert printed.getvalue().count(QUANTIZED_TEACHER) == 1
    matches = latest(run, "check").summary["native"]["greedy_match"]
    assert matches == {"sequences": 4, "identical": 4, "ties": 0}
    assert latest(run, "train").summary["drift"]["kl"] > 0

    ids_BT = torch.arange(30).view(2, 15)
    expected = logits_with_adapter_on(tiny_target, latest(run, "train").path / "adapter", ids_BT)
    published = AutoModelForCausalLM.from_pretrained(latest(run, "export").path / "backbone")
    assert published.dtype == torch.float32
    assert not getattr(published.config, "quantization_config", None)
    torch.testing.assert_close(published(input_ids=ids_BT).logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("own", "asked", "trained"),
    [
        (None, None, None),
        ("4bit", None, "4bit"),
        ("4bit", "8bit", "8bit"),
        ("4bit", "none", None),
        (None, "none", None),
    ],
)
def test_the_copy_is_quantized_like_the_target_by_default(make_tuning, own, asked, trained):
    spec = make_tuning(quantization=asked)
    spec = replace(spec, target=replace(spec.target, quantization=own))
    assert spec.trained_target == replace(spec.target, quantization=trained)
