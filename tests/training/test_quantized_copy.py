"""Only the copy that trains is quantized: what is published is the target's own weights and what
was learned.
"""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from pipeline.flow import run_flow
from pipeline.stages.train import QUANTIZED_TEACHER
from tests.flows.tiny import latest
from tests.targets.adapters import logits_with_adapter_on

MEDUSA_2 = {
    "train__method": "medusa-2",
    "train__backbone__sequence_length": 96,
    "train__backbone__batch_sequences": 4,
    "train__backbone__micro_batch": 4,
    "train__backbone__lora_rank": 4,
    "train__backbone__lr": 0.05,
    "train__backbone__max_kl": 50.0,
    "check__prompts": 4,
}


@pytest.mark.slow
def test_a_run_with_a_four_bit_copy_publishes_whole_weights_that_decode_exactly(
    make_config, tmp_path, tiny_target, monkeypatch
):
    pytest.importorskip("bitsandbytes")
    loaded, load = [], AutoModelForCausalLM.from_pretrained

    def spy(name, *args, **settings):
        loaded.append(
            (str(name) == str(tiny_target), settings.get("quantization_config") is not None)
        )
        return load(name, *args, **settings)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    config = make_config(tmp_path, **MEDUSA_2, train__backbone__quantization="4bit")
    run = run_flow(config, executor="inline", console=Console(file=(said := StringIO())))
    assert [quantized for _, quantized in loaded].count(True) == 1 and (True, True) in loaded
    assert (
        said.getvalue().count(QUANTIZED_TEACHER) == 1
        and "nats from the target in 4bit" in said.getvalue()
    )
    report = json.loads((run.path / "report.json").read_text())
    assert report["check"]["native"]["greedy_match"] == {"sequences": 4, "identical": 4, "ties": 0}
    assert report["train"]["drift"]["kl"] > 0

    ids_BT = torch.arange(30).view(2, 15)
    backbone = latest(run, "export").path / "backbone"
    expected = logits_with_adapter_on(tiny_target, latest(run, "train").path / "adapter", ids_BT)
    published = AutoModelForCausalLM.from_pretrained(backbone)
    assert published.dtype == torch.float32 and not getattr(
        published.config, "quantization_config", None
    )
    torch.testing.assert_close(published(input_ids=ids_BT).logits, expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("own", "asked", "trained"),
    [
        (None, None, None),
        ("4bit", None, "4bit"),
        (None, "8bit", "8bit"),
        ("4bit", "8bit", "8bit"),
        ("4bit", "none", None),
        (None, "none", None),
    ],
)
def test_the_copy_is_quantized_like_the_target_unless_it_is_said(make_tuning, own, asked, trained):
    spec = make_tuning(quantization=asked)
    spec = replace(spec, target=replace(spec.target, quantization=own))
    assert (
        spec.trained_target == replace(spec.target, quantization=trained)
        and spec.target.quantization == own
    )
