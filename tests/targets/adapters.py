"""An adapter such as Medusa-2 trains, with random weights: LoRA on every linear layer, lm_head
included.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

RANK = 4


def save_adapter(target: str | Path, directory: Path, *, seed: int = 0, size: float = 0.02) -> Path:
    """Write an adapter of the target at `directory`; its changes are of about `size`."""
    from peft import LoraConfig, get_peft_model  # slow to import

    model = AutoModelForCausalLM.from_pretrained(target)
    layers = [
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    ]
    settings = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=layers)
    adapted = get_peft_model(model, settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.copy_(size**0.5 * torch.randn(weight.shape, generator=generator))
    adapted.save_pretrained(directory, save_embedding_layers=False)
    return directory


@torch.inference_mode()
def logits_with_adapter_on(target: str | Path, adapter: Path, ids_BT: torch.Tensor) -> torch.Tensor:
    """The target's logits with the adapter beside its weights, in fp32."""
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return PeftModel.from_pretrained(model, adapter)(input_ids=ids_BT).logits
