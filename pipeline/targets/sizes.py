"""Count the parameters of a target from its config.json, without its weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from pipeline.config.training import Bits
from pipeline.targets.spec import TargetSpec, quantization_of

BITS: dict[Bits, int] = {"8bit": 8, "4bit": 4}
FOUR_BITS = ("'num_bits': 4", "'bits': 4", "'w_bit': 4", "'load_in_4bit': True")
"""The forms in which the settings of a quantized checkpoint state 4 bits."""


@dataclass(frozen=True)
class TargetSizes:
    """Parameter counts of a target, and the size of a parameter."""

    parameters: int  # tied ones are counted once
    linear: int  # parameters of the linear layers without lm_head, which quantization makes smaller
    adapted: int  # sum of these layers' input and output sizes: LoRA's parameters per rank
    itemsize: int  # bytes of a parameter in the target's dtype
    stored_bits: int  # bits of a linear layer's parameter in the files

    def weight_bytes(self, quantization: Bits | None = None) -> float:
        """Return the bytes of the weights, after quantization by bitsandbytes if it is given."""
        bits = BITS[quantization] if quantization else self.stored_bits
        return (self.parameters - self.linear) * self.itemsize + self.linear * bits / 8


def parameter_counts(spec: TargetSpec, config: PretrainedConfig) -> TargetSizes | None:
    """Count the parameters of a target; None if no model can be built from its config.json."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    itemsize = spec.torch_dtype.itemsize
    stored_bits, quantization = 8 * itemsize, quantization_of(config)
    if quantization:
        is_four_bits = any(words in str(quantization) for words in FOUR_BITS)
        stored_bits = 4 if is_four_bits else 8
        del config.quantization_config
    try:
        with torch.device("meta"):  # parameters have shapes and take no memory
            model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=spec.trust_remote_code
            )
    except Exception:  # any error of a family's own code
        return None
    lm_head, linear, adapted = model.get_output_embeddings(), 0, 0
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not lm_head:
            linear += layer.weight.numel()
            adapted += sum(layer.weight.shape)
    return TargetSizes(model.num_parameters(), linear, adapted, itemsize, stored_bits)
