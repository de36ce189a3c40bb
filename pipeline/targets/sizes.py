"""How large a target is, from its config.json alone: parameters, widths, keys and values of a token.

The model is built on torch's meta device, where parameters have shapes and take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config.training import Bits
from pipeline.targets.spec import TargetSpec, context_length, model_config

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

# Bytes of a number: bitsandbytes' int8 with a scale per row; NF4 with a scale per 64, themselves in 8 bit.
QUANTIZED_BYTES: dict[Bits, float] = {"8bit": 1.01, "4bit": 0.5 + 1 / 64}


@dataclass(frozen=True)
class TargetSizes:
    """A target's sizes, in numbers (not bytes) where nothing else is said."""

    parameters: int  # tied ones once
    linear: int  # of the linear layers but lm_head: what quantization makes smaller
    in_layers: int  # of all decoder layers: what several workers can split
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    width: int  # of a token's widest state within a layer
    linear_inputs: int  # of one layer's linear layers, in all
    linear_outputs: int
    adapted_in_layer: int  # the linear layers of a decoder layer
    adapted: int  # inputs and outputs of all linear layers, lm_head among them: LoRA's parameters per rank
    context: int  # tokens, `target.max_tokens` included
    cached: int  # keys and values of one token
    itemsize: int  # bytes of a number in the target's dtype
    window: int = 0  # tokens that a layer with a sliding window keeps
    cached_in_windows: int = 0  # of `cached`, those of such layers
    stored_bits: int | None = None  # of a linear layer's number, in a checkpoint that is quantized already

    def weight_bytes(self, quantization: Bits | None = None) -> float:
        """Of all weights as they are loaded; `quantization` is bitsandbytes', on loading."""
        linear_bytes: float = self.itemsize
        if quantization:
            linear_bytes = QUANTIZED_BYTES[quantization]
        elif self.stored_bits:
            linear_bytes = self.stored_bits / 8 * 1.05  # with scales
        return (self.parameters - self.linear) * self.itemsize + self.linear * linear_bytes

    @property
    def cached_bytes(self) -> int:
        """Keys and values of one token."""
        return self.cached * self.itemsize

    def conversation_bytes(self, num_tokens: int, in_flight: int) -> int:
        """Keys and values of a conversation in vLLM; layers with a sliding window keep that and a forward's tokens."""
        outside = max(0, num_tokens - self.window - in_flight)
        return self.itemsize * (self.cached * num_tokens - self.cached_in_windows * outside)


def target_sizes(spec: TargetSpec) -> TargetSizes | None:
    """The sizes of a target; only its configuration is read. None of a model whose code needs its weights.

    Raises:
        ConfigError, EnvironmentFault: As `model_config` does.
    """
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    config = model_config(spec)
    stored_bits = _stored_bits(config)
    if stored_bits:
        del config.quantization_config
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    except Exception:  # whatever a family's code raises where there are no numbers
        return None
    text, head = config.get_text_config(), model.get_output_embeddings()
    layers = _layers(model)
    linear = list(_linear(model))
    in_layer = list(_linear(layers[0])) if layers else []
    experts = (getattr(text, "num_experts_per_tok", None) or 0) * (getattr(text, "moe_intermediate_size", None) or 0)
    return TargetSizes(
        parameters=sum(weight.numel() for weight in model.parameters()),
        linear=sum(each.weight.numel() for each in linear if each is not head),
        in_layers=sum(weight.numel() for layer in layers for weight in layer.parameters()),
        num_hidden_layers=len(layers) or text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        width=max([experts, *(size for each in in_layer for size in each.weight.shape)], default=4 * text.hidden_size),
        linear_inputs=sum(each.weight.shape[1] for each in in_layer),
        linear_outputs=sum(each.weight.shape[0] for each in in_layer),
        adapted_in_layer=len(in_layer),
        adapted=sum(sum(each.weight.shape) for each in linear if isinstance(each, nn.Linear)),
        context=context_length(spec, config),
        cached=cached_numbers(config),
        itemsize=getattr(torch, spec.dtype).itemsize,
        window=getattr(text, "sliding_window", None) or 0,
        cached_in_windows=round(cached_numbers(config) * _share_of_windows(text)),
        stored_bits=stored_bits,
    )


def forward_bytes(sizes: TargetSizes, num_tokens: int) -> float:
    """What a forward without gradients holds at once beside the weights: of one layer, its widest states."""
    in_mlp = 3 * sizes.width + 3 * sizes.hidden_size
    in_norm = (2 + 12 / sizes.itemsize) * sizes.hidden_size  # fp32 within
    return num_tokens * sizes.itemsize * max(in_mlp, in_norm, 8 * sizes.hidden_size)


def cached_numbers(config: PretrainedConfig) -> int:
    """Numbers of all layers' keys and values of one token.

    With multi-head latent attention (DeepSeek's) a layer keeps one compressed vector for all its heads and one rotated
    key, in transformers and in vLLM alike.
    """
    text = config.get_text_config()
    if latent := getattr(text, "kv_lora_rank", None):
        return int(text.num_hidden_layers * (latent + text.qk_rope_head_dim))
    num_heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    return 2 * text.num_hidden_layers * (getattr(text, "num_key_value_heads", None) or num_heads) * head_dim


def _share_of_windows(text: PretrainedConfig) -> float:
    """Which share of the layers attends to a sliding window alone; all of a family that does not tell them apart."""
    if not getattr(text, "sliding_window", None):
        return 0.0
    types = getattr(text, "layer_types", None) or ["sliding_attention"]
    return float(types.count("sliding_attention") / len(types))


def _layers(model: nn.Module) -> list[nn.Module]:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _linear(module: nn.Module) -> Iterator[Any]:
    from torch import nn

    return (each for each in module.modules() if isinstance(each, nn.Linear))


def _stored_bits(config: PretrainedConfig) -> int | None:
    """Bits of a number in a checkpoint that is quantized (AWQ, GPTQ, fp8); None for others."""
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    found = settings if isinstance(settings, dict) else settings.to_dict()
    method, groups = str(found.get("quant_method", "")), found.get("config_groups") or {}
    of_groups = [(group.get("weights") or {}).get("num_bits") for group in groups.values() if isinstance(group, dict)]
    if bits := max(filter(None, of_groups), default=None):  # compressed-tensors
        return int(bits)
    return int(found.get("bits") or found.get("w_bit") or (8 if "8" in method or found.get("load_in_8bit") else 4))
