"""LoRA on a target: every linear layer, lm_head included, by peft (paper 2.2.2; Hu et al. 2106.09685).

Targets with weights that peft does not adapt are rejected before any weight is loaded (`require_tunable`). The adapter
of a tied lm_head does not change the shared embedding, which stays frozen.
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.errors import ConfigError
from pipeline.targets import files
from pipeline.targets.spec import TargetSpec, model_config

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PretrainedConfig, PreTrainedModel

HEADS_ALONE = "Train the heads alone (train.method: medusa-1), or choose another target."
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # applied after lm_head by some families


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The names of all layers that LoRA adapts.

    Raises:
        ConfigError: There are none, lm_head is not among them, or there are other matrices: a mixture's experts stored
            as one parameter, or layers of a kind that peft does not know.
    """
    from transformers.pytorch_utils import Conv1D

    found = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)]
    missed = [
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if not isinstance(module, nn.Linear | nn.Embedding | Conv1D)
        for parameter, weight in module.named_parameters(recurse=False)
        if weight.dim() > 1
    ]
    if missed or not isinstance(model.get_output_embeddings(), nn.Linear):
        what = f"LoRA does not find {missed[0]}" if missed else "LoRA does not find the target's lm_head"
        more = f" and {len(missed) - 1} more of its weights" if len(missed) > 1 else ""
        raise ConfigError(f"{what}{more}, so the backbone cannot be tuned whole.", files.WHERE, HEADS_ALONE)
    return found


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The model's decoder layers, the units of sharding.

    Raises:
        ConfigError: It has none that support transformers' gradient checkpointing.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if layers := [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        return layers
    fix = "Set train.backbone.shard: false, or choose a target whose layers transformers knows."
    raise ConfigError("The target has no decoder layers that could be split over workers.", files.WHERE, fix)


def require_tunable(spec: TargetSpec, rank: int, *, sharded: bool = False) -> None:
    """Check, without loading weights, that the target can be tuned and its adapter merged.

    Raises:
        ConfigError: It is quantized on disk, changes its logits after lm_head, has weights that LoRA does not adapt,
            the rank exceeds its hidden size, or it is to be `sharded` and has no layers to shard.
    """
    from transformers import AutoModelForCausalLM

    config = model_config(spec)
    text = config.get_text_config()
    if getattr(config, "quantization_config", None):
        fix = (
            "Name the target's original weights; train.backbone.quantization: 4bit trains on a quantized copy of them."
        )
        raise ConfigError("A tuned backbone cannot be merged into weights that are quantized.", files.WHERE, fix)
    if rank > text.hidden_size:
        fix = "Lower it: 32 is usual."
        raise ConfigError(
            f"A rank of {rank} is more than the hidden size, {text.hidden_size}.", "train.backbone.lora_rank", fix
        )
    if changed := changed_logits(config):
        what = f"The target changes its logits after lm_head ({changed}), which the backbone's loss does not include."
        raise ConfigError(what, files.WHERE, HEADS_ALONE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    linear_layers(model)
    if sharded:
        decoder_layers(model)


def changed_logits(config: PretrainedConfig) -> str | None:
    """The setting by which the model scales or caps its logits after lm_head, if any."""
    text = config.get_text_config()
    return next((key for key in LOGIT_CHANGES if getattr(text, key, None) not in (None, 1, 1.0)), None)


def add_lora(model: PreTrainedModel, *, rank: int, alpha: int, dropout: float) -> PeftModel:
    """The target with new LoRA adapters in fp32; everything else is frozen.

    The B matrices are zero, so the model is unchanged; the A matrices are drawn from torch's global generator.

    Raises:
        ConfigError: As `linear_layers` does.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # imported by peft; warns of missing kernels on a CPU
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=linear_layers(model),
    )
    with warnings.catch_warnings(action="ignore"):  # warns of tied embeddings, see above
        return get_peft_model(model, settings)
