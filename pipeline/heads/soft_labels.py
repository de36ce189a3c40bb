"""Soft labels: the target's own distributions, which heads learn beside the tokens that were
written.

Head k at position t guesses the token at t+2+k. What the target would have written there is its
lm_head on its state at t+1+k: wherever the head has a label, that state is one that the target
computed within the same span.

Letters: M states of the target, C rows of a chunk, N rows (positions), D hidden size, V vocabulary,
    K heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TargetHead(NamedTuple):
    """How the target turns states into logits, frozen: `softcap · tanh(scale · (W x + b) /
    softcap)`.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0  # Cohere, Granite
    softcap: float | None = None  # Gemma 2

    def to(self, device: torch.device, dtype: torch.dtype) -> TargetHead:
        bias_V = None if self.bias_V is None else self.bias_V.to(device, dtype)
        return self._replace(weight_VD=self.weight_VD.to(device, dtype), bias_V=bias_V)

    def of_tokens(self, tokens: Tensor) -> TargetHead:
        """The logits of these tokens alone, whose softmax is the target's distribution over them,
        summing to one.
        """
        bias = None if self.bias_V is None else self.bias_V[tokens]
        return self._replace(weight_VD=self.weight_VD[tokens], bias_V=bias)

    def logits(self, states_CD: Tensor, out: Tensor | None = None) -> Tensor:
        """Logits [C, V], in the states' dtype; into `out` where it is given."""
        logits_CV = torch.mm(states_CD, self.weight_VD.to(states_CD.dtype).t(), out=out)
        if self.bias_V is not None:
            logits_CV.add_(self.bias_V.to(logits_CV.dtype))
        if self.scale != 1.0:
            logits_CV.mul_(self.scale)
        if self.softcap is not None:
            logits_CV.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits_CV


class Teacher(NamedTuple):
    """The soft labels of a batch.

    `rows_KN` int64 says which of the states each head's label is predicted from; -1 where that
    state is not there: the head then learns the written token alone. Of the other labels' losses,
    `share` is the cross entropy with the target's distribution, the rest that with the token.
    """

    head: TargetHead
    states_MD: Tensor
    rows_KN: Tensor
    share: float
