"""The Medusa heads: K small networks that read one hidden state and guess the K tokens after the next one.

Head k maps the target's hidden state at position t (after its final norm: what its lm_head reads) to the token at
t+2+k, as `x + SiLU(W1 x + b1)`, L times, then `W2`. With W1 = 0, b1 = 0 and W2 = lm_head at the start, every head's
first prediction is exactly the target's (paper 2.1.1). Parameters are stacked over the heads, so that all K run in one
batched product. Names of the exported tensors are those that vLLM, TGI and TensorRT-LLM read.

Letters: N rows, D hidden size, V vocabulary, K heads, L residual blocks per head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from pipeline.errors import DataError


@dataclass(frozen=True)
class HeadsConfig:
    """The shape of a set of heads; `tied` heads share the target's frozen lm_head instead of training a copy each."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    tied: bool = False

    def __post_init__(self) -> None:
        sizes = (self.hidden_size, self.vocab_size, self.num_heads, self.num_layers)
        if min(sizes) < 1:
            raise ValueError(f"every size of the heads must be at least 1: {self}")


class MedusaHeads(nn.Module):
    """All K heads at once; zero until filled, see `from_lm_head` and `from_named_tensors`.

    Parameters: `block_weight` [L, K, D, D] and `block_bias` [L, K, D]; `lm_head` is [K, V, D], or, tied, a frozen
    [V, D] that no gradient reaches (a parameter and not a buffer, so that DDP does not broadcast it every step).
    """

    def __init__(self, config: HeadsConfig, *, dtype: torch.dtype | None = None, device: torch.device | None = None):
        super().__init__()
        self.config = config
        num_blocks, num_heads, size = config.num_layers, config.num_heads, config.hidden_size
        self.block_weight = nn.Parameter(torch.zeros(num_blocks, num_heads, size, size, dtype=dtype, device=device))
        self.block_bias = nn.Parameter(torch.zeros(num_blocks, num_heads, size, dtype=dtype, device=device))
        copies = () if config.tied else (num_heads,)
        lm_head = torch.zeros(*copies, config.vocab_size, size, dtype=dtype, device=device)
        self.lm_head = nn.Parameter(lm_head, requires_grad=not config.tied)

    @classmethod
    def from_lm_head(cls, config: HeadsConfig, lm_head_VD: Tensor) -> MedusaHeads:
        """Heads that start as the target's own prediction, in the dtype and on the device of its lm_head (2.1.1).

        Untied heads get a copy each; tied ones share `lm_head_VD`'s storage. Raises ValueError on another shape.
        """
        if lm_head_VD.shape != (config.vocab_size, config.hidden_size):
            expected = (config.vocab_size, config.hidden_size)
            raise ValueError(f"the lm_head is {tuple(lm_head_VD.shape)}, the heads expect {expected}")
        heads = cls(config, dtype=lm_head_VD.dtype, device=lm_head_VD.device)
        heads._fill_lm_head(lm_head_VD)
        return heads

    def _fill_lm_head(self, lm_head: Tensor) -> None:
        if self.config.tied:
            self.lm_head = nn.Parameter(lm_head.detach(), requires_grad=False)
        else:
            self.lm_head.data.copy_(lm_head)  # [V, D] broadcasts to the K copies

    def hidden(self, hidden_ND: Tensor, num_heads: int | None = None) -> Tensor:
        """What each head's lm_head reads: [N, D] to [K, N, D], or the first `num_heads` heads' only."""
        num_heads = self.config.num_heads if num_heads is None else num_heads
        device = hidden_ND.device.type
        autocast = torch.is_autocast_enabled(device)  # the sums x + SiLU(…) then stay in its dtype, as the products do
        hidden_ND = hidden_ND.to(torch.get_autocast_dtype(device) if autocast else self.block_weight.dtype)
        hidden_KND = hidden_ND.expand(num_heads, *hidden_ND.shape)
        for weight_KDD, bias_KD in zip(self.block_weight, self.block_bias, strict=True):
            weight_KDD, bias_K1D = weight_KDD[:num_heads], bias_KD[:num_heads, None]
            hidden_KND = hidden_KND + silu(torch.baddbmm(bias_K1D, hidden_KND, weight_KDD.mT))
        return hidden_KND

    def forward(self, hidden_ND: Tensor, num_heads: int | None = None) -> Tensor:
        """Logits [K, N, V] of all heads, or of the first `num_heads` (the others are then not evaluated)."""
        hidden_KND = self.hidden(hidden_ND, num_heads)
        if self.config.tied:
            return hidden_KND @ self.lm_head.mT
        # Weights first: at N = 1, decoding's case, a CPU is then three times faster (K = 4, D = 256, V = 4,096).
        return (self.lm_head[: len(hidden_KND)] @ hidden_KND.mT).mT


def to_named_tensors(heads: MedusaHeads, *, expand_tied: bool = True) -> dict[str, Tensor]:
    """Detached views of the heads as engines name them: `{k}.{l}.linear.weight`, `.bias` and `{k}.{L}.weight`.

    Tied heads name their one lm_head K times, or, with `expand_tied=False`, once: `0.{L}.weight`.
    """
    config = heads.config
    blocks = [(f"{k}.{block}.linear", block, k) for k in range(config.num_heads) for block in range(config.num_layers)]
    views = {f"{name}.weight": heads.block_weight[block, k] for name, block, k in blocks}
    views |= {f"{name}.bias": heads.block_bias[block, k] for name, block, k in blocks}
    lm_heads = [heads.lm_head] * (config.num_heads if expand_tied else 1) if config.tied else heads.lm_head
    views |= {f"{k}.{config.num_layers}.weight": lm_head for k, lm_head in enumerate(lm_heads)}
    return {name: view.detach() for name, view in views.items()}


def from_named_tensors(config: HeadsConfig, tensors: Mapping[str, Tensor], *, where: str | None = None) -> MedusaHeads:
    """Heads from the engines' tensors, the inverse of `to_named_tensors`, in the tensors' own dtype.

    Tied heads are read from K equal lm_heads or from one, whose storage they share. Raises DataError, naming `where`,
    when a tensor is missing, unknown or of another shape, or when tied heads' lm_heads differ.
    """
    single = config.tied and f"1.{config.num_layers}.weight" not in tensors
    _check_names_and_shapes(config, tensors, where, expand_tied=not single)
    lm_head, *others = (tensors[f"{k}.{config.num_layers}.weight"] for k in range(1 if single else config.num_heads))
    if config.tied and not all(torch.equal(lm_head, other) for other in others):
        fix = "Read them as untied heads."
        raise DataError("The heads are said to be tied, but their lm_heads differ.", where, fix)
    heads = MedusaHeads(config, dtype=lm_head.dtype, device=lm_head.device)
    for name, view in to_named_tensors(heads, expand_tied=False).items():
        if not (config.tied and tensors[name] is lm_head):
            view.copy_(tensors[name])
    if config.tied:
        heads._fill_lm_head(lm_head)
    return heads


def _check_names_and_shapes(
    config: HeadsConfig, tensors: Mapping[str, Tensor], where: str | None, *, expand_tied: bool
) -> None:
    empty = MedusaHeads(config, device=torch.device("meta"))
    expected = {name: tuple(view.shape) for name, view in to_named_tensors(empty, expand_tied=expand_tied).items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        shown = ", ".join(f"{name}: {found.get(name, 'absent')} for {expected.get(name, 'none')}" for name in wrong[:4])
        raise DataError(
            f"{len(wrong)} tensors are not those of {config}: {shown} (found for expected).",
            where,
            "Read the heads with the configuration that they were exported with.",
        )
