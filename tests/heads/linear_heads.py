"""A third kind of heads, for the tests: one linear layer per head; see `pipeline/heads/kind.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pipeline.config import TrainConfig
from pipeline.heads.draft_cache import DraftCache
from pipeline.heads.kind import Heads, TargetWeights
from pipeline.heads.rows import Rows
from pipeline.heads.shapes import ExportFormat, HeadsShape


@dataclass(frozen=True)
class LinearShape(HeadsShape):
    kind: ClassVar[str] = "linear"


class LinearHeads(Heads):
    """Heads that are one lm_head [K, V, D]."""

    Shape = LinearShape
    title = "Linear heads"
    card_about = "Each is one linear layer on the target's last hidden state."

    def __init__(
        self,
        shape: LinearShape,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(shape)
        sizes = (shape.num_heads, shape.vocab_size, shape.hidden_size)
        self.lm_head = nn.Parameter(torch.zeros(sizes, dtype=dtype, device=device))

    @classmethod
    def shape_of(
        cls, settings: TrainConfig, hidden_size: int, vocab_size: int, num_layers: int
    ) -> LinearShape:
        return LinearShape(hidden_size, vocab_size, settings.num_heads)

    @classmethod
    def initial(cls, shape: LinearShape, target: TargetWeights) -> LinearHeads:
        lm_head_VD = target.lm_head()
        heads = cls(shape, dtype=lm_head_VD.dtype, device=lm_head_VD.device)
        heads.lm_head.data.copy_(lm_head_VD)
        return heads

    def states(
        self, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor, rows: Rows | None = None
    ) -> Tensor:
        return hidden_ND.to(self.lm_head.dtype).expand(self.shape.num_heads, *hidden_ND.shape)

    def expand(
        self, hidden_BPD: Tensor, tokens_BP: Tensor, depth: int, cache: DraftCache | None = None
    ) -> tuple[Tensor, Tensor]:
        return hidden_BPD, hidden_BPD.to(self.lm_head.dtype) @ self.lm_head[depth].mT

    @classmethod
    def engine_config(
        cls, shape: LinearShape, format: ExportFormat, target: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {"model_type": "linear-heads"}

    def named_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        return {f"heads.{k}.weight": weight_VD.detach() for k, weight_VD in enumerate(self.lm_head)}
