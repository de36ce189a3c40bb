"""The tuned backbone: a target with its trained LoRA adapter merged into the weights.

The merge is computed in fp32, the adapter's dtype, and rounded once to the target's dtype. A target that runs in 4 or 8
bit is merged in its unquantized weights and quantized again when the result is loaded.

Memory: the target once, in its dtype, on the CPU, plus the fp32 change of one matrix at a time (for a 70B target 140 GB
and 4 GB).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.errors import DataError
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_tuned(spec: TargetSpec, adapter: Path) -> PreTrainedModel:
    """The target with `adapter` (a directory of peft's `save_pretrained`) merged, frozen, on the CPU.

    Tied embeddings are untied: the lm_head has been trained and the input embedding has not.

    Raises:
        ConfigError: transformers cannot load the target.
        DataError: There is no adapter of this target, or merging it gives numbers that are not finite.
    """
    from peft import PeftModel

    model = load_causal_lm(replace(spec, quantization=None))
    untie(model)
    try:
        adapted = PeftModel.from_pretrained(model, str(adapter))
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().split("\n")[0].rstrip(".")
        fix = "Run again with --fresh train."
        raise DataError(f"There is no adapter of this target here: {reason}.", str(adapter), fix) from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warns of tied embeddings, which are untied above
        merged = adapted.merge_and_unload()
    for name, weight in merged.named_parameters():
        if not torch.isfinite(torch.stack(weight.aminmax())).all():
            fix = "Train again with a lower train.backbone.lr, or set target.dtype to bfloat16."
            raise DataError(f"The merged {name} is not finite in {weight.dtype}.", str(adapter), fix)
    return merged.eval().requires_grad_(False)


def untie(model: PreTrainedModel) -> None:
    """Give a model with tied embeddings a separate lm_head, a copy of its input embedding."""
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    if head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr():
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=head.weight.requires_grad)
    model.config.tie_word_embeddings = text.tie_word_embeddings = False
