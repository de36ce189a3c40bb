from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from pipeline.config import BackboneConfig
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets.lora import load_tuned
from pipeline.targets.spec import TargetSpec
from pipeline.training.adapted_backbone import Backbone, verify_packing, write_adapter
from pipeline.training.backbone_losses import measure_drift
from pipeline.training.text_batches import TextBatch, assemble_texts, read_texts

CPU = torch.device("cpu")


@pytest.fixture
def sequences(texts):
    """Six conversations, three in each of two sequences."""
    settings = {
        "fingerprint": "9" * 64,
        "vocab_size": 40,
        "roles": ("assistant",),
        "sequence_length": 64,
    }
    found = read_texts(texts, **settings)["train"][:6]
    return [found[:3], found[3:]]


@pytest.fixture
def batch(sequences) -> TextBatch:
    return assemble_texts(sequences, 3)


def make(spec: TargetSpec, **settings) -> Backbone:
    torch.manual_seed(1)
    usual = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.0, "gradient_checkpointing": False}
    return Backbone(spec, BackboneConfig(**{**usual, **settings}), CPU)


def disturbed(backbone: Backbone) -> Backbone:
    """The same with an adapter that changes something."""
    draw = torch.Generator().manual_seed(5)
    for name, weight in backbone.named_parameters():
        if "lora_B" in name:
            weight.data = 0.2 * torch.randn(weight.shape, generator=draw)
    return backbone


@pytest.fixture
def tied(tmp_path) -> TargetSpec:
    """A target whose lm_head is its embedding."""
    torch.manual_seed(2)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "tied")
    return TargetSpec(str(tmp_path / "tied"))


def drift_of(backbone: Backbone, batch: TextBatch) -> tuple[float, ...]:
    hidden, original = backbone.states(batch), backbone.original_states(batch)
    return tuple(
        map(
            float,
            measure_drift(hidden, backbone.low(hidden), backbone.head, original, batch.next_N),
        )
    )


def test_before_the_first_step_the_tuned_model_is_the_original(target, batch):
    backbone = make(target)
    assert torch.equal(backbone.states(batch), backbone.original_states(batch))
    kl, original_loss, tuned_loss, agreed, positions = drift_of(backbone, batch)
    assert kl == 0 and original_loss == tuned_loss and agreed == positions


def test_the_original_stays_itself_while_the_adapter_changes(target, batch):
    backbone = make(target)
    before = backbone.original_states(batch)
    disturbed(backbone)
    assert torch.equal(backbone.original_states(batch), before)
    assert not torch.allclose(backbone.states(batch), before, atol=1e-2)
    frozen = [weight for name, weight in backbone.named_parameters() if "lora_" not in name]
    assert not any(weight.requires_grad for weight in frozen)


def gradients(backbone: Backbone, batches: list[TextBatch]) -> tuple[float, list[torch.Tensor]]:
    """Of a loss that looks at every learned state; gradients of all batches together."""
    backbone.zero_grad()
    total = 0.0
    for batch in batches:
        hidden = backbone.states(batch)
        logits = hidden @ backbone.head.weight_VD.T + backbone.low(hidden) @ backbone.head.lora_VR.T
        loss = torch.nn.functional.cross_entropy(logits, batch.next_N, reduction="sum")
        loss.backward()
        total += float(loss.detach())
    return total, [weight.grad for weight in backbone.parameters() if weight.requires_grad]


@pytest.mark.parametrize("recompute", [False, True])
def test_packed_conversations_do_not_see_each_other(target, sequences, batch, recompute):
    """Losses and gradients of packed sequences are those of the conversations one by one."""
    backbone = disturbed(make(target, gradient_checkpointing=recompute))
    backbone.train()
    packed, ours = gradients(backbone, [batch])
    alone, theirs = gradients(
        backbone, [assemble_texts([[text]], 3) for texts in sequences for text in texts]
    )
    assert packed == pytest.approx(alone, rel=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert all(gradient.abs().sum() > 0 for gradient in ours)


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_run_twice_where_recomputation_is_asked_for(target, batch, recompute):
    backbone = disturbed(make(target, gradient_checkpointing=recompute))
    calls = []
    layer = next(
        module for name, module in backbone.named_modules() if name.endswith("layers.0.mlp")
    )
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    backbone.train()
    gradients(backbone, [batch])
    assert len(calls) == 1 + recompute
    backbone.original_states(batch)
    assert len(calls) == 2 + recompute and not calls[-1]


def test_a_target_that_does_not_fit_names_what_makes_it_smaller_where_it_trains(
    target, monkeypatch
):
    def full(*_, **__):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(
        EnvironmentFault,
        match=r"does not fit.*train\.backbone\.shard.*train\.backbone\.quantization",
    ):
        make(target)


def test_a_model_in_which_they_would_is_refused():
    """OPT has learned positions and looks for no sequence's beginning in them."""
    sizes = {
        "vocab_size": 40,
        "hidden_size": 32,
        "ffn_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32, init_std=0.3)).eval()
    with pytest.raises(ConfigError, match="see each other"):
        verify_packing(model)


def test_dropout_is_lora_s_alone_and_only_while_training(target, batch):
    backbone = disturbed(make(target, lora_dropout=0.5))
    torch.manual_seed(0)
    backbone.train()
    first, second = backbone.states(batch), backbone.states(batch)
    assert not torch.allclose(first, second) and torch.equal(
        *[backbone.original_states(batch) for _ in range(2)]
    )
    assert not torch.allclose(backbone.low(first), backbone.low(first))
    backbone.eval()
    assert torch.equal(backbone.states(batch), backbone.states(batch))
    others = [module for name, module in backbone.named_modules() if "lora_dropout" not in name]
    backbone.train()
    assert not any(module.training for module in others)


def test_recomputation_does_not_draw_dropout_anew(target, batch):
    found = []
    for recompute in (False, True):
        backbone = disturbed(make(target, lora_dropout=0.3, gradient_checkpointing=recompute))
        backbone.train()
        torch.manual_seed(3)
        found.append(gradients(backbone, [batch]))
    assert found[0][0] == found[1][0]
    torch.testing.assert_close(found[0][1], found[1][1])


@pytest.mark.parametrize("which", ["target", "tied"])
def test_peft_loads_the_written_adapter_and_it_says_the_same(request, which, batch, tmp_path):
    from peft import PeftModel  # slow to import

    spec = request.getfixturevalue(which)
    backbone = disturbed(make(spec))
    write_adapter(tmp_path / "adapter", backbone, spec)
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert all(
        "lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    )
    with warnings.catch_warnings(action="ignore"):
        loaded = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(spec.model), tmp_path / "adapter"
        )
    logits = loaded.eval()(
        input_ids=batch.ids_BT, position_ids=batch.positions_BT, use_cache=False
    ).logits
    hidden = backbone.states(batch)
    expected = hidden @ backbone.head.weight_VD.T + backbone.low(hidden) @ backbone.head.lora_VR.T
    torch.testing.assert_close(logits.flatten(0, 1)[batch.learned_N], expected)


def test_the_adapter_s_file_is_the_same_whoever_writes_it(target, tmp_path):
    """peft keeps the layers in a set, whose order differs from process to process."""
    for name in ("one", "other"):
        write_adapter(tmp_path / name, disturbed(make(target)), target)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()
    layers = json.loads((tmp_path / "one" / "adapter_config.json").read_text())["target_modules"]
    assert layers == sorted(layers) and "lm_head" in layers


def test_the_adapter_names_the_commit_of_its_target(target, tmp_path):
    write_adapter(
        tmp_path / "adapter", make(target), replace(target, model="owner/target", revision="c0ffee")
    )
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("owner/target", "c0ffee")


def test_tuning_a_tied_lm_head_leaves_the_embedding_alone_and_the_merged_model_untied(
    tied, batch, tmp_path
):
    backbone = disturbed(make(tied))
    embedding = AutoModelForCausalLM.from_pretrained(tied.model).get_input_embeddings().weight
    assert torch.equal(backbone.head.weight_VD, embedding)
    write_adapter(tmp_path / "adapter", backbone, tied)
    merged = load_tuned(tied, tmp_path / "adapter")
    assert torch.equal(merged.get_input_embeddings().weight, embedding)
    assert not torch.allclose(merged.get_output_embeddings().weight, embedding, atol=1e-3)
    hidden = backbone.states(batch)
    expected = hidden @ backbone.head.weight_VD.T + backbone.low(hidden) @ backbone.head.lora_VR.T
    logits = merged(input_ids=batch.ids_BT, position_ids=batch.positions_BT, use_cache=False).logits
    torch.testing.assert_close(
        logits.flatten(0, 1)[batch.learned_N], expected, rtol=1e-3, atol=1e-4
    )


def test_a_quantized_target_trains_its_adapter_beside_four_bit_weights(batch, tmp_path):
    pytest.importorskip("bitsandbytes")
    torch.manual_seed(2)
    sizes = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=1)).save_pretrained(
        tmp_path / "target"
    )
    spec = TargetSpec(str(tmp_path / "target"))
    backbone, exact = make(replace(spec, quantization="4bit")), make(spec)
    assert any(type(weight).__name__ == "Params4bit" for weight in backbone.parameters())
    change = (backbone.original_states(batch) - exact.original_states(batch)).norm() / exact.states(
        batch
    ).norm()
    assert 0 < change < 0.3
    (loss, ours), (expected, theirs) = (
        gradients(disturbed(each), [batch]) for each in (backbone, exact)
    )
    assert loss == pytest.approx(expected, rel=0.1)
    for gradient, unquantized in zip(ours, theirs, strict=True):
        assert (gradient - unquantized).norm() < 0.5 * unquantized.norm()
