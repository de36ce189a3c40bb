from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from pipeline.config import BackboneConfig
from pipeline.errors import ConfigError
from pipeline.targets.spec import TargetSpec
from pipeline.training.adapted_backbone import Backbone, verify_packing, write_adapter
from pipeline.training.text_batches import TextBatch, assemble_texts
from tests.training.conftest import opened

CPU = torch.device("cpu")


@pytest.fixture
def sequences(texts):
    """Six conversations, three in each of two sequences."""
    found = opened(texts)["train"]
    return [found[:3], found[3:6]]


@pytest.fixture
def batch(sequences) -> TextBatch:
    return assemble_texts(sequences, 3)


def make(spec: TargetSpec, **settings) -> Backbone:
    """A backbone whose adapter is the identity."""
    torch.manual_seed(1)
    usual = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "gradient_checkpointing": False}
    return Backbone(spec, BackboneConfig(**{**usual, **settings}), CPU)


def tune(backbone: Backbone) -> Backbone:
    """The same with an adapter that changes something."""
    draw = torch.Generator().manual_seed(5)
    for name, weight in backbone.named_parameters():
        if "lora_B" in name:
            weight.data = 0.2 * torch.randn(weight.shape, generator=draw)
    return backbone


def logits(backbone: Backbone, batch: TextBatch) -> torch.Tensor:
    hidden = backbone.states(batch)
    own = hidden @ backbone.head.weight_VD.T
    return own + backbone.lora_inner(hidden) @ backbone.lora_outer.T


def test_the_original_stays_itself_while_the_adapter_changes(target, batch):
    backbone = make(target)
    before = backbone.original_states(batch)
    assert torch.equal(backbone.states(batch), before)
    tune(backbone)
    assert torch.equal(backbone.original_states(batch), before)
    assert not torch.allclose(backbone.states(batch), before, atol=1e-2)


def gradients(backbone: Backbone, batches: list[TextBatch]) -> tuple[float, list[torch.Tensor]]:
    """The summed cross entropy of all batches and its gradients."""
    backbone.zero_grad()
    total = 0.0
    for batch in batches:
        loss = torch.nn.functional.cross_entropy(
            logits(backbone, batch), batch.next_N, reduction="sum"
        )
        loss.backward()
        total += float(loss.detach())
    return total, [weight.grad for weight in backbone.parameters() if weight.requires_grad]


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_conversations_do_not_see_each_other(target, sequences, batch, recompute):
    """Losses and gradients of packed sequences are those of the conversations one by one."""
    backbone = tune(make(target, gradient_checkpointing=recompute))
    calls = []
    layer = backbone.tuned.get_base_model().model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    backbone.train()
    packed, ours = gradients(backbone, [batch])
    assert len(calls) == 1 + recompute
    singles = [assemble_texts([[text]], 3) for texts in sequences for text in texts]
    alone, theirs = gradients(backbone, singles)
    assert packed == pytest.approx(alone, rel=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert all(gradient.abs().sum() > 0 for gradient in ours)


def test_a_model_that_mixes_packed_conversations_is_refused():
    """OPT has learned positions and looks for no sequence's beginning in them."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "ffn_dim": 32, "word_embed_proj_dim": 32}
    torch.manual_seed(0)
    config = OPTConfig(**sizes, num_hidden_layers=1, num_attention_heads=1, init_std=0.3)
    with pytest.raises(ConfigError, match="see each other"):
        verify_packing(OPTForCausalLM(config).eval())


def test_dropout_is_loras_alone_and_only_while_training(target, batch):
    backbone = tune(make(target, lora_dropout=0.5))
    backbone.train()
    first, second = backbone.states(batch), backbone.states(batch)
    assert not torch.allclose(first, second)
    assert torch.equal(backbone.original_states(batch), backbone.original_states(batch))
    assert not torch.allclose(backbone.lora_inner(first), backbone.lora_inner(first))
    others = [module for name, module in backbone.named_modules() if "lora_dropout" not in name]
    assert not any(module.training for module in others)
    backbone.eval()
    assert torch.equal(backbone.states(batch), backbone.states(batch))


def test_the_adapters_files_are_the_same_in_any_process(target, tmp_path):
    """peft keeps the layers in a set, whose order differs from process to process."""
    spec = replace(target, model="owner/target", revision="c0ffee")
    write_adapter(tmp_path, make(target), spec)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    layers = config["target_modules"]
    assert layers == sorted(layers) and "lm_head" in layers
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/target", "c0ffee")
