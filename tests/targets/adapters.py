"""Write random LoRA adapters on every linear layer of a target, as Medusa-2 trains."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

RANK = 4


def save_adapter(target, directory, *, seed=0):
    """Write a random adapter of the target at `directory`."""
    from peft import LoraConfig, get_peft_model  # slow to import

    model = AutoModelForCausalLM.from_pretrained(target)
    layers = r".*(_proj|lm_head)"
    random = {"init_lora_weights": False}
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers, **random)
    torch.manual_seed(seed)
    get_peft_model(model, settings).save_pretrained(directory, save_embedding_layers=False)
    return directory


@torch.inference_mode()
def logits_with_adapter_on(target, adapter, ids_BT):
    """Return the target's fp32 logits with an unmerged adapter."""
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter)(input_ids=ids_BT).logits
