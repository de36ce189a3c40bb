"""FLOPs of forward and training by formula, and measurement of a device's peak rate and memory.

Only needed operations count: no padding, no masked half of causal attention, no label of -100, no
unused gradient. A share of the peak is therefore never overstated.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedModel

from pipeline.heads.shapes import MedusaShape

PEAK_PRODUCTS = 100  # enough for a GPU's clock to settle


def backbone_flops(model: PreTrainedModel, lengths: Iterable[int]) -> float:
    """Return the FLOPs of the backbone's forward, without lm_head, on texts of these lengths."""
    text = model.config.get_text_config()
    per_token = 2 * sum(
        part.weight.numel() for part in model.base_model.modules() if isinstance(part, nn.Linear)
    )
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    attention = (
        2 * text.num_hidden_layers * text.num_attention_heads * head_dim
    )  # two matrix products, half of each masked
    return float(sum(per_token * length + attention * length**2 for length in lengths))


def training_flops(config: MedusaShape, num_positions: float, num_labels: float) -> float:
    """Return the FLOPs of Medusa-1 training, forward and backward, over `num_positions` states.

    `num_labels` is the number of labels of all heads together. A trained lm_head takes three
    products per label (logits, gradient of the input, gradient of the weight), a frozen lm_head
    two. A head's first block needs no gradient of its input, the states.
    """
    size = config.hidden_size
    lm_head = (4 if config.lm_head == "tied" else 6) * config.vocab_size * size * num_labels
    blocks = (6 * config.num_layers - 2) * size**2 * config.num_heads * num_positions
    return lm_head + blocks


class Peak:
    """Measurement of a device's peak FLOP/s, by products of two large random matrices."""

    def __init__(self, device: torch.device, dtype: torch.dtype, size: int):
        self._left, self._right = (
            torch.randn(size, size, device=device).to(dtype) for _ in range(2)
        )
        self._out = torch.empty_like(self._left)
        self.flops = float(PEAK_PRODUCTS * 2 * size**3)

    def run(self) -> float:
        """Return the seconds that `flops` operations take."""
        synchronize(self._out.device)
        started = perf_counter()
        for _ in range(PEAK_PRODUCTS):
            torch.mm(self._left, self._right, out=self._out)
        synchronize(self._out.device)
        return perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished its queued work; do nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def reset_peak_memory(device: torch.device) -> float:
    """Free unused memory and reset the device's peak memory; return the memory in use, in GB."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device) / 1e9
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident_gb("VmRSS")


def peak_memory_gb(device: torch.device) -> float:
    """Return the peak memory since `reset_peak_memory`, in GB.

    It is that of a GPU's tensors, or of this process for a CPU.
    """
    return (
        torch.cuda.max_memory_allocated(device) / 1e9
        if device.type == "cuda"
        else _resident_gb("VmHWM")
    )


def _resident_gb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024 / 1e9
