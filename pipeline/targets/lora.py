"""Check, add and merge LoRA adapters of a target (paper section 2.2.2; Hu et al. 2106.09685).

Every linear layer is adapted, including lm_head. `require_tunable` rejects targets with matrices
that peft does not adapt, before any weight is loaded. The adapter of a tied lm_head does not change
the shared embedding, which stays frozen; merging unties lm_head and embedding.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from pipeline.errors import ConfigError, DataError
from pipeline.targets import files
from pipeline.targets.lm_head import MULTIPLIERS
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import TargetSpec, model_config, one_line, quantization_of

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

HEADS_ALONE = "Train the heads alone (train.method: medusa-1), or choose another target."
# applied after lm_head by some families
LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", *MULTIPLIERS)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the model's layers that LoRA adapts: all linear ones.

    Raises:
        ConfigError: The model has a matrix that peft cannot adapt: an lm_head that is not linear,
            experts stored as one parameter, or a layer type that peft does not know.
    """
    from transformers.pytorch_utils import Conv1D

    adapted, missed = [], []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            adapted.append(name)
        elif not isinstance(module, nn.Embedding):
            for parameter, weight in module.named_parameters(recurse=False):
                if weight.dim() > 1:
                    missed.append(f"{name}.{parameter}")
    if not isinstance(model.get_output_embeddings(), nn.Linear):
        missed.append("the target's lm_head")
    if missed:
        raise ConfigError(
            f"LoRA cannot adapt {', '.join(missed[:3])}, so it cannot tune the whole backbone.",
            files.WHERE,
            HEADS_ALONE,
        )
    return adapted


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return a model's decoder layers, which are the units of FSDP sharding.

    They are found by their base class in transformers, `GradientCheckpointingLayer`.

    Raises:
        ConfigError: There are none.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            "The target has no decoder layers that could be split over workers.",
            files.WHERE,
            "Set train.backbone.shard: false.",
        )
    return layers


def require_tunable(spec: TargetSpec, *, sharded: bool = False) -> None:
    """Check that LoRA can tune the target, without loading its weights.

    Raises:
        ConfigError: The target is quantized on disk, changes its logits after lm_head, has weights
            that LoRA does not adapt, or, if `sharded`, has no layers to shard.
    """
    from transformers import AutoModelForCausalLM

    config = model_config(spec)
    text = config.get_text_config()
    if quantization_of(config):
        raise ConfigError(
            "A tuned backbone cannot be merged into weights that are quantized.",
            files.WHERE,
            "Set target.model to the original weights; train.backbone.quantization: 4bit trains on"
            " a quantized copy.",
        )
    for key in LOGIT_CHANGES:
        if getattr(text, key, None) not in (None, 1):
            raise ConfigError(
                f"The target changes its logits after lm_head ({key}), which the backbone's loss"
                " does not include.",
                files.WHERE,
                HEADS_ALONE,
            )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.trust_remote_code)
    linear_layers(model)
    if sharded:
        decoder_layers(model)


def add_lora(model: PreTrainedModel, *, rank: int, alpha: int, dropout: float) -> PeftModel:
    """Add new fp32 LoRA adapters to a model in place, and freeze all other weights.

    The B matrices are zero, so the model's outputs stay the same. The A matrices are drawn from
    torch's global generator. Returns the PEFT model that wraps the model.

    Raises:
        ConfigError: As `linear_layers` does.
    """
    # peft imports bitsandbytes, which warns of missing kernels on a CPU
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=linear_layers(model),
    )
    with warnings.catch_warnings(action="ignore"):  # warnings about tied embeddings
        return get_peft_model(model, settings)


def load_tuned(spec: TargetSpec, adapter: Path) -> PreTrainedModel:
    """Load the target on the CPU with a LoRA adapter merged into its weights.

    `adapter` is a directory written by peft's `save_pretrained`. The merge is computed in fp32 and
    rounded once to the target's dtype. The weights are not quantized, even if `spec.quantization`
    is set. Tied embeddings are untied, because only the lm_head was trained. Memory: the target
    once, plus the fp32 change of one matrix at a time (for a 70B target 140 GB and 4 GB).

    Raises:
        ConfigError, EnvironmentFault: As `load_causal_lm` does.
        DataError: The directory holds no adapter of this target.
    """
    from peft import PeftModel

    model = load_causal_lm(replace(spec, quantization=None))
    untie_lm_head(model)
    try:
        adapted = PeftModel.from_pretrained(model, adapter)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise DataError(
            f"There is no adapter of this target here: {one_line(error)}.",
            adapter,
            "Run again with --fresh train.",
        ) from error
    with warnings.catch_warnings(action="ignore"):  # warnings about tied embeddings
        merged = adapted.merge_and_unload()
    return merged.eval().requires_grad_(False)


def untie_lm_head(model: PreTrainedModel) -> None:
    """Replace a tied lm_head weight by a copy, in place.

    The model's configuration then states that lm_head and input embedding are not tied.
    """
    head = model.get_output_embeddings()
    weight = head.weight
    if weight.data_ptr() == model.get_input_embeddings().weight.data_ptr():
        copied = weight.detach().clone()
        head.weight = nn.Parameter(copied, requires_grad=weight.requires_grad)
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
