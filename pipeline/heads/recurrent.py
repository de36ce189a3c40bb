"""Recurrent heads: one small cell that drafts token after token and reads each token it drafts.

Medusa heads predict from the target's state alone; sequential heads also read the tokens between
(Hydra, arXiv 2402.05109; ReDrafter, arXiv 2403.09919; EAGLE, arXiv 2401.15077). Here one cell
computes all steps. From a state h and the token that follows it, the next state is

    z = fc([embedding(token); h]),    h' = z + down(SiLU(gate x) * up x)  with  x = RMSNorm(z),

and the logits are lm_head(h'). Step 0 reads the target's state at position t, after the final norm,
and the token at t+1. Step k predicts the token at t+2+k. Embedding and lm_head are the target's and
frozen; the trained parameters are 2D² + 3DI weights and the D of the norm. At the start fc returns
h and `down` is zero, so that step 0 makes the target's own prediction, of the token at t+1. The
cell may take more steps than it was trained for.

The cell equals vLLM 0.32's EAGLE-1 model with a zero `o_proj`: attention then adds nothing, and the
layer is the residual MLP above. So vLLM serves it unmodified, with the target's embedding and
lm_head, which the export leaves out. The other attention projections are never used and therefore
small: eight query heads (for tensor parallelism up to 8), one key and value head, and the smallest
head size that every attention backend of vLLM supports.

Letters: N rows, B texts, P nodes of a tree, D hidden size, I inner size, V vocabulary, K steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, silu

from pipeline.config.training import TrainConfig
from pipeline.conversations.spans import IGNORED
from pipeline.heads.draft_cache import DraftCache
from pipeline.heads.kind import Heads, TargetWeights, computing_dtype, zero_parameter
from pipeline.heads.rows import Rows
from pipeline.heads.shapes import ExportFormat, RecurrentShape

# Sizes of the attention whose output is zero; it has one key and value head.
QUERY_HEADS = 8
HEAD_SIZE = 64

# Names of vLLM's EAGLE-1 model; the last two tensors are zero in a recurrent cell.
MLP = "layers.0.mlp"
NORM = "layers.0.post_attention_layernorm.weight"
ATTENTION = "layers.0.self_attn"
OUTPUT = f"{ATTENTION}.o_proj.weight"
FC_BIAS = "fc.bias"

# Targets whose vLLM class has the `model.embed_tokens` and `lm_head` that the draft model borrows.
SERVED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Phi3ForCausalLM",
    "GemmaForCausalLM",
    "Gemma3ForCausalLM",
)


class RecurrentHeads(Heads):
    """Recurrent draft heads: one cell that drafts a token per step, from its own last state.

    Parameters: `fc` [D, 2D] (its first D columns read the embedding, the others the state), `norm`
    [D], `gate` and `up` [I, D], `down` [D, I]. Frozen: `lm_head` [V, D], and `embedding`, which has
    a row for each token of the target.
    """

    Shape = RecurrentShape
    version = 2
    title = "Recurrent heads"
    units = "draft steps in training"
    lr_scale = 0.75  # measured: benchmarks/results/learning-rates.csv
    batch_scale = 0.25  # measured: benchmarks/results/passes.csv
    vllm_method = "eagle"
    saves_memory = ("a smaller train.recurrent.intermediate_size",)
    card_about = """\
One recurrent cell drafts all tokens: it reads the target's last hidden state and the token that follows, guesses the
next one with the target's own lm_head, and goes on from its own state and that guess. It is stored as vLLM's EAGLE-1
model, with an attention that adds nothing; embedding and lm_head are the target's and not in this file.
"""  # noqa: E501

    shape: RecurrentShape

    def __init__(
        self,
        shape: RecurrentShape,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(shape)
        size = shape.hidden_size
        inner = shape.intermediate_size
        zeros = partial(zero_parameter, dtype=dtype, device=device)
        self.fc = zeros(size, 2 * size)
        self.norm = zeros(size)
        self.gate = zeros(inner, size)
        self.up = zeros(inner, size)
        self.down = zeros(size, inner)
        self.embedding = zeros(shape.target_vocab_size, size, trains=False)
        self.lm_head: nn.Parameter = zeros(shape.vocab_size, size, trains=False)

    @classmethod
    def shape_of(
        cls, settings: TrainConfig, hidden_size: int, vocab_size: int, num_layers: int
    ) -> RecurrentShape:
        """Return the shape of the configured recurrent cell, with the target's whole vocabulary.

        The default intermediate size is four times the hidden size.
        """
        inner = settings.recurrent.intermediate_size or 4 * hidden_size
        return RecurrentShape(hidden_size, vocab_size, settings.num_heads, inner)

    @classmethod
    def initial(cls, shape: RecurrentShape, target: TargetWeights) -> RecurrentHeads:
        """Build an untrained recurrent cell, whose first step makes the target's own prediction.

        `gate` and `up` are random, from torch's default generator.
        """
        lm_head_VD = target.lm_head()
        heads = cls(shape, dtype=lm_head_VD.dtype, device=lm_head_VD.device)
        size = shape.hidden_size
        heads.fc.data[:, size:] = torch.eye(size)
        heads.norm.data.fill_(1)
        for weight_ID in (heads.gate, heads.up):
            nn.init.normal_(weight_ID, std=1 / math.sqrt(size))
        heads.take_from(target)
        return heads

    def take_from(self, target: TargetWeights) -> None:
        """Replace the recurrent cell's frozen embedding and lm_head by the target's.

        They are converted to the dtype of the cell. If they are equal, they share one parameter.
        """
        dtype = self.fc.dtype
        self.embedding = nn.Parameter(target.embedding().detach().to(dtype), requires_grad=False)
        self.lm_head = nn.Parameter(target.lm_head().detach().to(dtype), requires_grad=False)
        self._share_tied_matrix()

    def _share_tied_matrix(self) -> None:
        """Use one parameter for both the cell's embedding and lm_head if they are equal."""
        if self.embedding.shape == self.lm_head.shape and torch.equal(self.embedding, self.lm_head):
            self.lm_head = self.embedding

    def step(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Return the cell's next states [..., D] from its states [..., D] and tokens [...].

        They are in autocast's dtype if autocast is enabled, otherwise in the dtype of the weights.
        """
        dtype = computing_dtype(self.fc)
        embedded = embedding(tokens, self.embedding).to(dtype)
        z = linear(torch.cat((embedded, hidden.to(dtype)), -1), self.fc)
        x = rms_norm(z, z.shape[-1:], self.norm.to(z.dtype), self.shape.norm_eps)
        return z + linear(silu(linear(x, self.gate)) * linear(x, self.up), self.down)

    def states(
        self, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor, rows: Rows | None = None
    ) -> Tensor:
        """Compute the cell's states [K, N, D] after 1, 2, …, K steps over the true tokens."""
        states = []
        tokens_N = next_N
        for labels_N in labels_KN:
            hidden_ND = self.step(hidden_ND, tokens_N)
            states.append(hidden_ND)
            tokens_N = labels_N.where(labels_N != IGNORED, 0)  # no later step has a label there
        return torch.stack(states)

    def expand(
        self, hidden_BPD: Tensor, tokens_BP: Tensor, depth: int, cache: DraftCache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Advance the cell by the nodes' tokens: return states [B, P, D] and logits [B, P, V]."""
        hidden_BPD = self.step(hidden_BPD, tokens_BP)
        return hidden_BPD, hidden_BPD @ self.lm_head.mT

    # Export: vLLM's EAGLE-1 container

    @classmethod
    def vllm_refusal(cls, shape: RecurrentShape, target: Mapping[str, Any]) -> str | None:
        """Return why vLLM cannot serve this recurrent cell with the target, or None if it can."""
        if shape.is_pruned:
            return (
                "vLLM's EAGLE-1 model drafts with its target's whole lm_head: recurrent heads with"
                " a draft vocabulary (train.draft_vocab) decode natively only. It serves them"
                " without one, and Medusa heads with one."
            )
        architectures = target.get("architectures") or ["a target without architecture"]
        if set(SERVED).isdisjoint(architectures):
            borrowed = "its target's embedding and lm_head"
            return f"vLLM's EAGLE-1 model borrows {borrowed}; not from {architectures[0]}."
        return None

    @classmethod
    def engine_config(
        cls, shape: RecurrentShape, format: ExportFormat, target: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the keys of config.json for an EAGLE-1 model that computes this cell."""
        return {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": QUERY_HEADS,
            "num_key_value_heads": 1,
            "head_dim": HEAD_SIZE,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "max_position_embeddings": target.get("max_position_embeddings", 2048),
            "tie_word_embeddings": False,
        }

    def named_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """Return the recurrent cell's tensors by their names in vLLM's EAGLE-1 model.

        Without `format` (a heads file), these include embedding and lm_head. An export leaves both
        out and adds attention projections of zeros.
        """
        named: dict[str, Tensor] = {
            "fc.weight": self.fc,
            f"{MLP}.gate_proj.weight": self.gate,
            f"{MLP}.up_proj.weight": self.up,
            f"{MLP}.down_proj.weight": self.down,
            NORM: self.norm,
        }
        if format is None:
            named["embed_tokens.weight"] = self.embedding
            named["lm_head.weight"] = self.lm_head
        else:
            size = self.shape.hidden_size
            queries = QUERY_HEADS * HEAD_SIZE
            named[f"{ATTENTION}.q_proj.weight"] = self.fc.new_zeros(queries, size)
            named[f"{ATTENTION}.k_proj.weight"] = self.fc.new_zeros(HEAD_SIZE, size)
            named[f"{ATTENTION}.v_proj.weight"] = self.fc.new_zeros(HEAD_SIZE, size)
            named[OUTPUT] = self.fc.new_zeros(size, queries)
        return {name: parameter.detach() for name, parameter in named.items()}

    def complete(self, tensors: Mapping[str, Tensor], format: ExportFormat | None) -> None:
        """Let embedding and lm_head share one parameter if they are equal."""
        self._share_tied_matrix()
