"""Medusa heads: K small networks that read one hidden state and guess the K tokens after the next.

Head k maps the target's hidden state at position t to logits of the token at t+2+k: L residual
blocks `x + SiLU(W1 x + b1)`, then `W2`. It reads none of the tokens between. At the start W1 = 0,
b1 = 0 and W2 = lm_head, so that every head makes the target's own prediction, of the token at t+1
(paper 2.1.1). Parameters are stacked over the heads, so that all K run in one batched product.

One export suits vLLM 0.32, TGI and TensorRT-LLM:

- vLLM folds every key that contains "num" and "heads" into one number (likewise "layers"), so each
  such key holds the same number and none of the target's own are copied. Without `medusa_fc_bias`
  it drops the biases.
- TGI recognizes Medusa heads by the key `medusa_num_heads`, unless there is a key `architectures`.
- TensorRT-LLM reads `medusa_num_*` or `num_medusa_*`, depending on its version and entry point.

Letters: N rows, B texts, D hidden size, V vocabulary, K heads, L residual blocks per head, R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from pipeline.config.training import TrainConfig
from pipeline.errors import ConfigError
from pipeline.heads.draft_cache import DraftCache
from pipeline.heads.kind import Heads, ProposalTree, TargetWeights
from pipeline.heads.rows import Rows
from pipeline.heads.shapes import EXPANDED, SHARED, ExportFormat, MedusaShape


class MedusaHeads(Heads):
    """K Medusa heads, whose parameters are stacked so that one batched product runs them all.

    Parameters: `block_weight` [L, K, D, D], `block_bias` [L, K, D] and `lm_head`. The lm_head is
    [K, V, D] if untied, and one [V, D] if shared or tied. A tied lm_head is a frozen parameter.
    """

    Shape = MedusaShape
    title = "Medusa heads"
    lr_scale = 1.75  # measured: `python -m benchmarks.run recipe`
    vllm_method = "medusa"
    formats = (EXPANDED, SHARED)
    weights_file = "medusa_lm_head.safetensors"
    choices_file = "medusa_choices.json"
    saves_memory = ("train.medusa.lm_head: shared",)

    card_about = """\
Each is {{ train.medusa.num_layers | default(1) }} residual block(s) and
{% if train.medusa.lm_head == "shared" %}
one trained lm_head for all,
{% elif train.medusa.lm_head == "tied" %}
the target's own lm_head,
{% else %}
an lm_head,
{% endif %}
as in [Medusa](https://arxiv.org/abs/2401.10774): head k (from 0) reads the target's last hidden state at position t
and guesses the token at t+2+k.
{%- if train.draft_vocab %}
 In this file the rows of all other tokens are the mean of theirs, which is never the largest logit: engines draft the
same tokens as medusa-distill, and compute all rows.
{%- endif %}

"""  # noqa: E501
    card_engines = """\
{% if shared and train.medusa.num_layers != 1 %}
TGI cannot load these heads: it shares one lm_head among heads of one block only.
{% elif shared and (train.medusa.lm_head == "shared" or train.draft_vocab) %}
Not for TGI: it would read the target's own lm_head instead of the one in this file. `expanded` heads are.
{% else %}
With TGI 3.3.7, the last release of an archived project, which finds the base model in `config.json`:

```bash
text-generation-launcher --model-id {{ here }}
```
{% endif %}

{% if shared %}
TensorRT-LLM cannot load these heads: they store one lm_head for all, and it wants one each.
{% else %}
With TensorRT-LLM up to 1.3.0rc20 (Llama- and Qwen-shaped targets): its Medusa example's `convert_checkpoint.py` takes
this directory as `--medusa_model_dir`, with `--num_medusa_heads {{ num_heads or "K" }}` and a `--max_draft_len` of at
least {{ report.tree.nodes | number or "the tree's nodes" }}; the content of `{{ kind.choices_file }}` goes to
`--medusa_choices`.
{% endif %}
"""  # noqa: E501

    shape: MedusaShape

    def __init__(
        self,
        shape: MedusaShape,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(shape)
        size = shape.hidden_size
        zeros = partial(torch.zeros, dtype=dtype, device=device)
        blocks = (shape.num_layers, shape.num_heads)
        self.block_weight = nn.Parameter(zeros(*blocks, size, size))
        self.block_bias = nn.Parameter(zeros(*blocks, size))
        sizes = [shape.vocab_size, size]
        if shape.lm_head == "untied":
            sizes.insert(0, shape.num_heads)
        is_trained = shape.lm_head != "tied"
        self.lm_head = nn.Parameter(zeros(sizes), requires_grad=is_trained)

    @classmethod
    def shape_of(
        cls, settings: TrainConfig, hidden_size: int, vocab_size: int, num_layers: int
    ) -> MedusaShape:
        """Return the shape of the configured Medusa heads, with the target's whole vocabulary."""
        own = settings.medusa
        return MedusaShape(hidden_size, vocab_size, settings.num_heads, own.num_layers, own.lm_head)

    @classmethod
    def initial(cls, shape: MedusaShape, target: TargetWeights) -> MedusaHeads:
        """Build untrained Medusa heads, which make the target's own prediction (paper 2.1.1).

        Tied heads share the storage of the target's lm_head; others copy it.
        """
        lm_head_VD = target.lm_head()
        heads = cls(shape, dtype=lm_head_VD.dtype, device=lm_head_VD.device)
        if shape.lm_head == "tied":
            heads.lm_head = nn.Parameter(lm_head_VD.detach(), requires_grad=False)
        else:
            heads.lm_head.data.copy_(lm_head_VD)  # [V, D] broadcasts to K copies
        return heads

    def hidden(self, hidden_ND: Tensor, num_heads: int | None = None) -> Tensor:
        """Compute the residual blocks [K, N, D] of all heads, or of the first `num_heads`."""
        num_heads = num_heads or self.shape.num_heads
        device = hidden_ND.device.type
        dtype = self.block_weight.dtype
        if torch.is_autocast_enabled(device):  # residual sums in its dtype, like the products
            dtype = torch.get_autocast_dtype(device)
        hidden_KND = hidden_ND.to(dtype).expand(num_heads, *hidden_ND.shape)
        for weight_KDD, bias_KD in zip(self.block_weight, self.block_bias, strict=True):
            weight_KDD = weight_KDD[:num_heads]
            bias_K1D = bias_KD[:num_heads, None]
            hidden_KND = hidden_KND + silu(torch.baddbmm(bias_K1D, hidden_KND, weight_KDD.mT))
        return hidden_KND

    def states(
        self, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor, rows: Rows | None = None
    ) -> Tensor:
        """Compute the input [K, N, D] of the Medusa heads' lm_heads, from `hidden_ND` alone."""
        return self.hidden(hidden_ND)

    def forward(self, hidden_ND: Tensor, num_heads: int | None = None) -> Tensor:
        """Compute the logits [K, N, V] of all Medusa heads, or of the first `num_heads`."""
        hidden_KND = self.hidden(hidden_ND, num_heads)
        if self.lm_head.dim() == 2:
            return hidden_KND @ self.lm_head.mT
        # Weights first: at N = 1, decoding's case, a CPU is then three times faster (K = 4, D =
        # 256, V = 4,096).
        return (self.lm_head[: len(hidden_KND)] @ hidden_KND.mT).mT

    def expand(
        self, hidden_BPD: Tensor, tokens_BP: Tensor, depth: int, cache: DraftCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the states [B, P, D] unchanged, and Medusa head `depth`'s logits [B, P, V].

        The logits are computed from the root's state, and all nodes get the same. Since states are
        unchanged, every deeper node has the root's state.
        """
        root_B1D = hidden_BPD[:, :1]
        num_nodes = hidden_BPD.shape[1]
        weights_DD = self.block_weight[:, depth]
        biases_D = self.block_bias[:, depth]
        read_B1D = root_B1D.to(weights_DD.dtype)
        for weight_DD, bias_D in zip(weights_DD, biases_D, strict=True):
            read_B1D = read_B1D + silu(linear(read_B1D, weight_DD, bias_D))
        return hidden_BPD, linear(read_B1D, self.lm_head_of(depth)).expand(-1, num_nodes, -1)

    def propose(
        self,
        hidden_BD: Tensor,
        token_B: Tensor,
        tree: ProposalTree,
        cache: DraftCache | None = None,
    ) -> Tensor:
        """Propose the tree's tokens [B, N] from one forward pass of the first `max_depth` heads."""
        rows_KBR = self(hidden_BD, tree.max_depth).topk(tree.top).indices
        guesses_KBR = self.vocabulary.tokens_of_rows(rows_KBR).to(token_B.device)
        return guesses_KBR.transpose(0, 1).flatten(1).index_select(1, tree.guess)

    @classmethod
    def check_format(cls, shape: MedusaShape, format: ExportFormat) -> None:
        """Raise ConfigError unless Medusa heads of this shape can be exported in this format."""
        super().check_format(shape, format)
        if format.one_lm_head and shape.lm_head == "untied":
            raise ConfigError(
                "The shared format stores one lm_head, and untied heads have one each.",
                "export.formats",
                "Set train.medusa.lm_head to shared or tied, or export.formats to [expanded].",
            )

    @classmethod
    def engine_config(
        cls, shape: MedusaShape, format: ExportFormat, target: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the keys of config.json that vLLM, TGI and TensorRT-LLM read for Medusa heads."""
        config = {
            "model_type": "medusa",
            "medusa_num_heads": shape.num_heads,
            "medusa_num_layers": shape.num_layers,
            "num_medusa_heads": shape.num_heads,
            "num_medusa_layers": shape.num_layers,
            "medusa_fc_bias": True,
        }
        if format.one_lm_head:
            config["original_lm_head"] = True
        return config

    def named_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """Return the tensors by name: `{k}.{l}.linear.weight`, `{k}.{l}.linear.bias`, lm_heads.

        Head k's lm_head is `{k}.{L}.weight`; an lm_head that is stored once for all heads is
        `0.{L}.weight`. In an export (`format` is not None) the lm_heads of pruned heads are copies,
        expanded to a row for each token of the target.
        """
        shape = self.shape
        lm_head = self.lm_head
        num_lm_heads = shape.num_heads
        if format is not None:
            lm_head = self.vocabulary.over_all_tokens(lm_head)
        if shape.lm_head != "untied" and (format is None or format.one_lm_head):
            num_lm_heads = 1
        views = {}
        for part, stacked in (("weight", self.block_weight), ("bias", self.block_bias)):
            for k in range(shape.num_heads):
                for block in range(shape.num_layers):
                    views[f"{k}.{block}.linear.{part}"] = stacked[block, k]
        for k in range(num_lm_heads):
            own = lm_head if lm_head.dim() == 2 else lm_head[k]
            views[f"{k}.{shape.num_layers}.weight"] = own
        return {name: view.detach() for name, view in views.items()}

    def complete(self, tensors: Mapping[str, Tensor], format: ExportFormat | None) -> None:
        """Copy the draft vocabulary's lm_head rows from an export of pruned heads."""
        if format is not None and self.shape.is_pruned:  # `named_tensors` gave copies of lm_head
            for k in range(self.shape.num_heads):
                name = f"{k}.{self.shape.num_layers}.weight"
                if name in tensors:
                    rows_VD = tensors[name][self.vocabulary.token_map]
                    self.lm_head_of(k).detach().copy_(rows_VD)
