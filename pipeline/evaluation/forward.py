"""One plain forward over a text, of which only the last positions are looked at."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.targets.loading import input_device


@torch.inference_mode()
def last_positions(model: PreTrainedModel, ids: list[int], number: int) -> tuple[Tensor, Tensor]:
    """The states [number, D] that the lm_head reads at a text's last positions, and the logits [number, V] there.

    No other logits are made where the model can leave them out: of a long prompt they would take gigabytes.
    """
    ids_1T = torch.tensor([ids], device=input_device(model))
    can_select = "logits_to_keep" in inspect.signature(model.forward).parameters
    selection: dict[str, Any] = {"logits_to_keep": number} if can_select else {}
    seen: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits_1TV = model(input_ids=ids_1T, use_cache=False, **selection).logits
    finally:
        hook.remove()
    return seen[-1][0, -number:], logits_1TV[0, -number:]
