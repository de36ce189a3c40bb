"""LoRA on a target: every linear layer, lm_head included, by peft (paper 2.2.2; Hu et al. 2106.09685).

What peft does not reach is refused before any weight is loaded. A tied lm_head keeps its adapter to itself: the
embedding it shares is frozen, and stays what it was until someone merges; see `require_tunable` for what cannot be.
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
LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling")  # what some families do after lm_head


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The names of all layers that LoRA adapts.

    Raises:
        ConfigError: There are none, lm_head is not among them, or other weights multiply too: a mixture's experts that
            are stored as one parameter, or layers of a kind that peft does not know.
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
    """The model's layers, the units in which its weights are split over GPUs.

    Raises:
        ConfigError: It has none of the kind that transformers recomputes one by one.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if layers := [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        return layers
    fix = "Set train.backbone.shard: false, or choose a target whose layers transformers knows."
    raise ConfigError("The target has no decoder layers that could be split over workers.", files.WHERE, fix)


def require_tunable(spec: TargetSpec, rank: int, *, sharded: bool = False) -> None:
    """Refuse a target that cannot be tuned or whose adapter could not be merged, without loading weights.

    Raises:
        ConfigError: It is quantized on disk, computes its logits by more than lm_head, has weights that LoRA does not
            find, the rank is beyond its hidden size, or it is to be `sharded` and has no layers that can be.
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
        what = f"The target changes what its lm_head says ({changed}), which the backbone's loss does not follow."
        raise ConfigError(what, files.WHERE, HEADS_ALONE)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    linear_layers(model)
    if sharded:
        decoder_layers(model)


def changed_logits(config: PretrainedConfig) -> str | None:
    """The setting by which a family scales or caps what its lm_head says, if it does."""
    text = config.get_text_config()
    return next((key for key in LOGIT_CHANGES if getattr(text, key, None) not in (None, 1, 1.0)), None)


def add_lora(model: PreTrainedModel, *, rank: int, alpha: int, dropout: float) -> PeftModel:
    """The target with fresh LoRA in fp32, which changes nothing yet: its outer half is zero. Everything else is frozen.

    Its inner half is drawn from torch's generator.

    Raises:
        ConfigError: As `linear_layers` does.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it, and it misses kernels on every CPU
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=linear_layers(model),
    )
    with warnings.catch_warnings(action="ignore"):  # of tied embeddings (see above) and of what it then does right
        return get_peft_model(model, settings)
