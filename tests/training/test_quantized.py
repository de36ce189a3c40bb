"""Training from states of 8 bits, and beside a quantized copy of the target."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from pipeline.flow import run_flow
from tests.flows.tiny import latest
from tests.targets.adapters import logits_with_adapter_on


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
    config = make_config(tmp_path, train__method="medusa-2", train__backbone=backbone)
    run = run_flow(config, until="export", executor="inline", console=Console(quiet=True))
    assert loaded == [str(tiny_target)]
    assert latest(run, "train").summary["drift"]["kl"] > 0

    ids_BT = torch.arange(30).view(2, 15)
    expected = logits_with_adapter_on(tiny_target, latest(run, "train").path / "adapter", ids_BT)
    published = AutoModelForCausalLM.from_pretrained(latest(run, "export").path / "backbone")
    torch.testing.assert_close(published(input_ids=ids_BT).logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("own", "asked", "trained"),
    [("4bit", None, "4bit"), ("4bit", "8bit", "8bit"), ("4bit", "none", None)],
)
def test_the_copy_is_quantized_like_the_target_by_default(make_tuning, own, asked, trained):
    spec = make_tuning(quantization=asked)
    spec = replace(spec, target=replace(spec.target, quantization=own))
    assert spec.trained_target == replace(spec.target, quantization=trained)
