"""The tiny target in float32, with an end token that it often writes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def model(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
