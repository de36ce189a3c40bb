"""A step fetches from the device once: every further fetch would have the host wait for it."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.decoding.decoder import Decoder
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.test_acceptance import RULES

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


class Fetches(TorchDispatchMode):
    """Counts the numbers that the host reads out of tensors: `int(…)`, `.item()`, `if tensor`,
    `x[0-dim tensor]`.
    """

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        waits = (
            torch.ops.aten.item,
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.nonzero,
            torch.ops.aten.equal,
        )
        self.count += operator.overloadpacket in waits
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("tree", [(), cartesian_tree((3, 2))], ids=["plain", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_one_fetch_per_step_and_one_for_the_prefill(
    rule, tree, target_of, continuation, fitted_heads, monkeypatch
):
    model = target_of("llama")
    heads = fitted_heads(model, PROMPT + continuation(model, PROMPT, 40), 3, known=0.7)
    decoder = Decoder(model, heads, tree, eos_token_ids=())
    lists, fetch_list = [], torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: lists.append(tensor) or fetch_list(tensor)
    )
    with Fetches() as fetches:
        decoded = decoder.generate(PROMPT, 20, rule, torch.Generator().manual_seed(0))
    assert fetches.count + len(lists) == 1 + decoded.num_steps
