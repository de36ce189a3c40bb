"""EAGLE-3 heads: a decoder layer that attends to the text and reads several layers of the target.

EAGLE-3 (arXiv 2503.01840). Position i of a text reads g, the outputs of several layers of the
target at i side by side, and the token at i+1:

    u = hidden_norm(fc g),    x = [input_norm(embedding(token)); u],
    z = r + o attention(q x, k x, v x),    y = z + down(SiLU(gate m) * up m)  with  m = norm(z),

and the logits are lm_head(output_norm(y)). The residual r is fc g in the paper, and u if the shape
has `norm_before_residual`. All norms are RMSNorms; rotary positions are those of the states. Step 0
attends to all positions up to i. Step k >= 1 has position i+k: it reads the last step's y in place
of fc g, and the token at i+1+k. It attends to the keys of step 0 up to i, and to the keys of its
own steps 1 … k. Decoding does the same: the keys of accepted tokens come from the target's states,
and those of drafted tokens live within one path of one tree.

The embedding is the target's and frozen. Trained are fc [D, X] (X = D times the number of layers),
the norms, attention, MLP, and the lm_head, which starts as the target's. At the start fc returns
the highest layer's output, attention and MLP add nothing, and each position attends mostly to
itself: q and k are nearly the same random matrix. The token at i+1 reaches y through attention
alone, so heads that start with random attention learn several times more slowly. The layer may take
more steps than it was trained for.

It equals vLLM 0.32's `Eagle3LlamaForCausalLM` and, by their code, the models of llama.cpp,
TensorRT-LLM and SGLang. The last two know no `norm_before_residual`, so heads that are trained here
do without it. Layer L is the output of the target's L-th layer, which transformers calls
`hidden_states[L]` (the last layer's before the norm).

Letters: S positions of packed rows, N positions with labels, C queries of a block, T new rows of a
text, B texts, P nodes of a tree, D hidden size, X inputs, I inner size, V vocabulary, K steps,
H query heads, G key-value heads, R = H / G, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, einsum, nn
from torch.nn.functional import embedding, linear, rms_norm, silu
from torch.utils.checkpoint import checkpoint

from pipeline.config.training import TrainConfig
from pipeline.conversations.spans import IGNORED
from pipeline.errors import ConfigError, DataError
from pipeline.heads.draft_cache import DraftCache
from pipeline.heads.kind import (
    TOKEN_MAP,
    Heads,
    TargetWeights,
    computing_dtype,
    zero_parameter,
)
from pipeline.heads.rows import Rows
from pipeline.heads.shapes import Eagle3Shape, ExportFormat

QUERIES = 256  # of a block of attention in training
KEY_VALUE_HEADS = 8  # for tensor parallelism up to 8, if there are as many query heads
OWN_QUERIES = 0.3  # what distinguishes query heads of one key at the start
HEAD_SIZES = (128, 64)  # that every attention backend of vLLM supports; the first that fits twice

# Targets whose vLLM class returns the outputs of its layers.
SERVED = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Phi3ForCausalLM",
    "Gemma4ForCausalLM",
    "GptOssForCausalLM",
    "GraniteForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Cohere2MoeForCausalLM",
    "Ernie4_5ForCausalLM",
    "MiniCPM3ForCausalLM",
    "MiniMaxM2ForCausalLM",
    "MiMoV2FlashForCausalLM",
    "ApertusForCausalLM",
    "AfmoeForCausalLM",
)


class Eagle3Heads(Heads):
    """EAGLE-3 draft heads: one decoder layer that drafts a token per step."""

    Shape = Eagle3Shape
    version = 3
    title = "EAGLE-3 heads"
    units = "draft steps in training"
    batch_scale = 0.25
    vllm_method = "eagle3"
    saves_memory = ("a smaller train.eagle3.intermediate_size", "train.draft_vocab")
    card_about = """\
One decoder layer drafts all tokens (EAGLE-3, arXiv 2503.01840). It reads the outputs of several
layers of the target at every position of the text, attends to all earlier positions, and goes on
from its own state and its last guess.
"""
    card_engines = """\
By their code, these engines read the heads too: TensorRT-LLM; llama.cpp
(`convert_hf_to_gguf.py --target-model-dir TARGET`); SGLang, with the prefix `layers.0.` of the
tensors' names replaced by `midlayer.`.
"""

    shape: Eagle3Shape

    def __init__(
        self,
        shape: Eagle3Shape,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(shape)
        size = shape.hidden_size
        queries = shape.attention_heads * shape.head_size
        keys = shape.key_value_heads * shape.head_size
        zeros = partial(zero_parameter, dtype=dtype, device=device)
        self.fc = zeros(size, shape.row_size)
        self.input_norm = zeros(size)
        self.hidden_norm = zeros(size)
        self.q = zeros(queries, 2 * size)
        self.k = zeros(keys, 2 * size)
        self.v = zeros(keys, 2 * size)
        self.o = zeros(size, queries)
        self.norm = zeros(size)
        self.gate = zeros(shape.intermediate_size, size)
        self.up = zeros(shape.intermediate_size, size)
        self.down = zeros(size, shape.intermediate_size)
        self.output_norm = zeros(size)
        self.lm_head: nn.Parameter = zeros(shape.vocab_size, size)
        self.embedding = zeros(shape.target_vocab_size, size, trains=False)

    @classmethod
    def shape_of(
        cls, settings: TrainConfig, hidden_size: int, vocab_size: int, num_layers: int
    ) -> Eagle3Shape:
        """Return the shape of the configured layer, with the target's whole vocabulary.

        Raises:
            ConfigError: A layer is configured that the target does not have.
        """
        own = settings.eagle3
        layers = layers_of(own.layers, num_layers)
        head_size = next((size for size in HEAD_SIZES if hidden_size >= 2 * size), HEAD_SIZES[-1])
        attention_heads = own.attention_heads or _attention_heads(hidden_size // head_size)
        return Eagle3Shape(
            hidden_size,
            vocab_size,
            settings.num_heads,
            layers=layers,
            intermediate_size=own.intermediate_size or 4 * hidden_size,
            attention_heads=attention_heads,
            key_value_heads=_key_value_heads(attention_heads),
            head_size=head_size,
        )

    @classmethod
    def initial(cls, shape: Eagle3Shape, target: TargetWeights) -> Eagle3Heads:
        """Build an untrained layer that reads the highest layer's output and attends to itself.

        k, v, gate and up are random, from torch's default generator.
        """
        lm_head_VD = target.lm_head()
        heads = cls(shape, dtype=lm_head_VD.dtype, device=lm_head_VD.device)
        size = shape.hidden_size
        heads.fc.data[:, -size:] = torch.eye(size)
        for norm_D in (heads.input_norm, heads.hidden_norm, heads.norm, heads.output_norm):
            norm_D.data.fill_(1)
        for weight in (heads.q, heads.k, heads.v, heads.gate, heads.up):
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
        keys_GEZ = heads.k.data.unflatten(0, (shape.key_value_heads, shape.head_size))
        shared_by = shape.attention_heads // shape.key_value_heads
        queries = keys_GEZ.repeat_interleave(shared_by, 0).flatten(0, 1)
        heads.q.data.mul_(OWN_QUERIES).add_(queries)
        heads.lm_head.data.copy_(lm_head_VD)
        heads.take_from(target)
        return heads

    def take_from(self, target: TargetWeights) -> None:
        """Replace the frozen embedding by the target's, in the dtype of the heads."""
        matrix = target.embedding().detach().to(self.fc.dtype)
        self.embedding = nn.Parameter(matrix, requires_grad=False)

    # The layer

    def _norm(self, x: Tensor, weight_D: Tensor) -> Tensor:
        """Return RMSNorm(x) with one of the layer's weights."""
        return rms_norm(x, x.shape[-1:], weight_D.to(x.dtype), self.shape.norm_eps)

    def _read(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return x [..., 2 D] and r [..., D] of states [..., D] and the tokens [...] after them."""
        hidden = hidden.to(computing_dtype(self.fc))
        u = self._norm(hidden, self.hidden_norm)
        residual = u if self.shape.norm_before_residual else hidden
        embedded = self._norm(embedding(tokens, self.embedding).to(u.dtype), self.input_norm)
        return torch.cat((embedded, u), -1), residual

    def _queries(self, x: Tensor, position: Tensor) -> Tensor:
        """Return queries [..., H, E] of x [..., 2 D] at rotary positions [...]."""
        q = linear(x, self.q).unflatten(-1, (-1, self.shape.head_size))
        return rotate(q, position, self.shape.rope_theta)

    def _key_values(self, x: Tensor, position: Tensor) -> Tensor:
        """Return keys and values [..., 2, G, E] of x [..., 2 D] at rotary positions [...]."""
        k = linear(x, self.k).unflatten(-1, (-1, self.shape.head_size))
        v = linear(x, self.v).unflatten(-1, (-1, self.shape.head_size))
        return torch.stack((rotate(k, position, self.shape.rope_theta), v), -3)

    def _empty_path(self, x: Tensor) -> Tensor:
        """Return keys and values [..., 0, 2, G, E] of no step."""
        return x.new_empty(*x.shape[:-1], 0, 2, self.shape.key_value_heads, self.shape.head_size)

    def _outputs(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return y [..., D] of r [..., D] and the attention's result [..., H, E]."""
        z = residual + linear(attended.flatten(-2).to(residual.dtype), self.o)
        m = self._norm(z, self.norm)
        return z + linear(silu(linear(m, self.gate)) * linear(m, self.up), self.down)

    # Training and calibration

    def states(
        self, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor, rows: Rows | None = None
    ) -> Tensor:
        """Compute the normed states [K, N, D] after 1, 2, …, K steps over the true tokens.

        `hidden_ND` is not read. One pass over all positions gives the keys of step 0.
        """
        assert rows is not None, "these heads read whole rows"
        position_S = torch.arange(len(rows.tokens_S), device=next_N.device) - rows.start_S
        read_SD = linear(rows.states_SX.to(computing_dtype(self.fc)), self.fc)
        x_SZ, residual_SD = self._read(read_SD, rows.tokens_S)
        keys_1GSE, values_1GSE = self._key_values(x_SZ, position_S).permute(1, 2, 0, 3)[:, None]
        x_NZ = x_SZ.index_select(0, rows.learned_N)
        residual_ND = residual_SD.index_select(0, rows.learned_N)
        position_N = position_S[rows.learned_N]
        blocks = rows.blocks(QUERIES)
        path_NKE = self._empty_path(x_NZ)
        states: list[Tensor] = []
        tokens_N = next_N
        for step, labels_N in enumerate(labels_KN):
            if step:
                x_NZ, residual_ND = self._read(states[-1], tokens_N)
                own_NE = self._key_values(x_NZ, position_N + step)
                path_NKE = torch.cat((path_NKE, own_NE[:, None]), 1)
            queries_NHE = self._queries(x_NZ, position_N + step)
            attended_NHE = attend_to_rows(
                queries_NHE, keys_1GSE, values_1GSE, path_NKE, rows, blocks
            )
            states.append(self._outputs(residual_ND, attended_NHE))
            tokens_N = labels_N.where(labels_N != IGNORED, 0)  # no later step has a label there
        return self._norm(torch.stack(states), self.output_norm)

    # Decoding

    def open_cache(self, num_texts: int, num_slots: int) -> DraftCache:
        """Allocate the layer's key/value cache for texts of up to `num_slots` positions."""
        shape = self.shape
        return DraftCache.empty(
            (num_texts, shape.key_value_heads, num_slots, shape.head_size), self.fc
        )

    def advance(
        self, read_BTX: Tensor, next_BT: Tensor, num_B: Tensor, cache: DraftCache | None
    ) -> Tensor:
        """Read positions that the target has computed; return each text's root [B, D + Z].

        The keys of all T positions are written to the cache, which grows by `num_B`. A root holds
        its state y [D], and room [Z] for the keys and values of the path below it.
        """
        assert cache is not None
        row_T = torch.arange(read_BTX.shape[1], device=read_BTX.device)
        read_BTD = linear(read_BTX.to(self.fc.dtype), self.fc)
        x_BTZ, residual_BTD = self._read(read_BTD, next_BT)
        cache.write(*self._key_values(x_BTZ, cache.length_B[:, None] + row_T).unbind(2))
        cache.length_B.add_(num_B)
        last_B11 = num_B[:, None, None] - 1
        x_B1Z = x_BTZ.take_along_dim(last_B11, 1)
        queries_B1HE = self._queries(x_B1Z, cache.length_B[:, None] - 1)
        attended_B1HE = attend_to_cache(queries_B1HE, self._empty_path(x_B1Z), cache)
        y_B1D = self._outputs(residual_BTD.take_along_dim(last_B11, 1), attended_B1HE)
        path_size = 2 * (self.shape.max_depth - 1) * self.k.shape[0]
        return torch.cat((y_B1D[:, 0], y_B1D.new_zeros(len(y_B1D), path_size)), 1)

    def expand(
        self,
        hidden_BPD: Tensor,
        tokens_BP: Tensor,
        depth: int,
        cache: DraftCache | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Expand P nodes at `depth`; return their states and the logits [B, P, V].

        The state of a node holds y, and the keys and values of the nodes on its path. The root is
        not computed again: `advance` has read its token.
        """
        size = self.shape.hidden_size
        y_BPD, path_BPZ = hidden_BPD[..., :size], hidden_BPD[..., size:]
        if depth:
            assert cache is not None
            position_B1 = cache.length_B[:, None] + depth - 1
            position_BP = position_B1.expand_as(tokens_BP)
            x_BPZ, residual_BPD = self._read(y_BPD, tokens_BP)
            own_BPZ = self._key_values(x_BPZ, position_BP).flatten(2)
            start = (depth - 1) * own_BPZ.shape[-1]
            before, after = path_BPZ[..., :start], path_BPZ[..., start + own_BPZ.shape[-1] :]
            path_BPZ = torch.cat((before, own_BPZ, after), -1)
            path_BPKE = path_BPZ[..., : start + own_BPZ.shape[-1]].unflatten(
                -1, (depth, 2, self.shape.key_value_heads, self.shape.head_size)
            )
            queries_BPHE = self._queries(x_BPZ, position_BP)
            attended_BPHE = attend_to_cache(queries_BPHE, path_BPKE, cache)
            y_BPD = self._outputs(residual_BPD, attended_BPHE)
        logits_BPV = self._norm(y_BPD, self.output_norm) @ self.lm_head.mT
        return torch.cat((y_BPD, path_BPZ), -1), logits_BPV

    # Export: the container that vLLM, SGLang, TensorRT-LLM and llama.cpp read

    @classmethod
    def vllm_refusal(cls, shape: Eagle3Shape, target: Mapping[str, Any]) -> str | None:
        """Return why vLLM cannot serve this layer with the target, or None if it can."""
        architectures = target.get("architectures") or ["a target without architecture"]
        if set(SERVED).isdisjoint(architectures):
            return (
                "vLLM's EAGLE-3 model reads the outputs of its target's layers, which vLLM does not"
                f" return for {architectures[0]}."
            )
        return None

    @classmethod
    def engine_config(
        cls, shape: Eagle3Shape, format: ExportFormat, target: Mapping[str, Any]
    ) -> dict[str, object]:
        """Return the keys of config.json for an EAGLE-3 model that computes this layer."""
        layer = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 1,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.target_vocab_size,
            "intermediate_size": shape.intermediate_size,
            "num_attention_heads": shape.attention_heads,
            "num_key_value_heads": shape.key_value_heads,
            "head_dim": shape.head_size,
            "hidden_act": "silu",
            "rms_norm_eps": shape.norm_eps,
            "rope_theta": shape.rope_theta,
            "max_position_embeddings": target.get("max_position_embeddings", 2048),
            "tie_word_embeddings": False,
            "num_aux_hidden_states": len(shape.layers),
        }
        return {
            **layer,
            "transformer_layer_config": layer,
            "draft_vocab_size": shape.vocab_size,
            "target_hidden_size": shape.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(shape.layers),
            "norm_before_residual": shape.norm_before_residual,
            # For SGLang, which counts layers from 0.
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in shape.layers],
            },
        }

    def named_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """Return the layer's tensors by their names in speculators' EAGLE-3 checkpoints.

        A heads file (no `format`) also holds the target's embedding.
        """
        named: dict[str, Tensor] = {
            "fc.weight": self.fc,
            "layers.0.input_layernorm.weight": self.input_norm,
            "layers.0.hidden_norm.weight": self.hidden_norm,
            "layers.0.self_attn.q_proj.weight": self.q,
            "layers.0.self_attn.k_proj.weight": self.k,
            "layers.0.self_attn.v_proj.weight": self.v,
            "layers.0.self_attn.o_proj.weight": self.o,
            "layers.0.post_attention_layernorm.weight": self.norm,
            "layers.0.mlp.gate_proj.weight": self.gate,
            "layers.0.mlp.up_proj.weight": self.up,
            "layers.0.mlp.down_proj.weight": self.down,
            "norm.weight": self.output_norm,
            "lm_head.weight": self.lm_head,
        }
        if format is None:
            named["embed_tokens.weight"] = self.embedding
        return {name: parameter.detach() for name, parameter in named.items()}

    def stored_tensors(self, format: ExportFormat | None = None) -> dict[str, Tensor]:
        """Return all tensors of a heads file or export, by name.

        In an export, a draft vocabulary is `d2t` [V], by how much each token's id exceeds its row,
        and `t2d` [W], whether each token of the target is in the vocabulary.
        """
        tokens_V, rows_W = self.vocabulary.token_map, self.vocabulary.rows_W
        if format is None or tokens_V is None or rows_W is None:
            return super().stored_tensors(format)
        tensors = self.named_tensors(format)
        tensors["d2t"] = tokens_V - torch.arange(len(tokens_V), device=tokens_V.device)
        tensors["t2d"] = rows_W != IGNORED
        return tensors

    @classmethod
    def draft_tokens(cls, tensors: Mapping[str, Tensor], where: str | None = None) -> Tensor:
        """Return the tokens [V] of the draft vocabulary in a heads file or export.

        Raises:
            DataError: `d2t` and `t2d` name different tokens.
        """
        if TOKEN_MAP in tensors:
            return super().draft_tokens(tensors, where)
        d2t_V, t2d_W = tensors["d2t"], tensors["t2d"]
        tokens_V = d2t_V + torch.arange(len(d2t_V), device=d2t_V.device)
        if not torch.equal(tokens_V, t2d_W.nonzero()[:, 0]):
            raise DataError(
                "The draft vocabulary's d2t and t2d name different tokens.",
                where,
                "Export or train these heads again.",
            )
        return tokens_V


def rotate(x: Tensor, position: Tensor, theta: float) -> Tensor:
    """Rotate queries or keys [..., heads, E] by their positions [...], as Llama does."""
    size = x.shape[-1]
    even = torch.arange(0, size, 2, device=x.device, dtype=torch.float32)
    angle = position[..., None, None] * theta ** (-even / size)
    angle = torch.cat((angle, angle), -1)
    low, high = x.chunk(2, -1)
    turned = torch.cat((-high, low), -1)
    return x * angle.cos().to(x.dtype) + turned * angle.sin().to(x.dtype)


def attend_to_rows(
    queries_NHE: Tensor,
    keys_1GSE: Tensor,
    values_1GSE: Tensor,
    path_NKE: Tensor,
    rows: Rows,
    blocks: Sequence[tuple[int, slice]],
) -> Tensor:
    """Attend from N positions to the keys of step 0 of their rows, and to keys of their own steps.

    Blocks of queries are computed one by one, and again in the backward pass, so that no more than
    one block's mask and scores [H, C, S] are in memory.

    Args:
        keys_1GSE, values_1GSE: Those of step 0. A query sees its row up to its own position.
        path_NKE: Keys and values [N, K, 2, G, E] of K later steps of each position.
        blocks: The number of queries of each block, and its keys, from `Rows.blocks`.
    """
    attended = [queries_NHE[:0]]  # a worker may have no row
    each_query = (queries_NHE, path_NKE, rows.learned_N, rows.start_S[rows.learned_N])
    sizes = [number for number, _ in blocks]
    parts = [each.split(sizes) for each in each_query]
    for (_, keys), *of_block in zip(blocks, *parts, strict=True):
        kept = (keys_1GSE[:, :, keys], values_1GSE[:, :, keys])
        attended.append(
            checkpoint(
                _attend_in_block,
                *of_block,
                keys.start,
                *kept,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    return torch.cat(attended)


def _attend_in_block(
    queries_CHE: Tensor,
    path_CKE: Tensor,
    position_C: Tensor,
    first_C: Tensor,
    start: int,
    keys_1GSE: Tensor,
    values_1GSE: Tensor,
) -> Tensor:
    """Attend from C positions to keys from the position `start` on, and to their own."""
    slot_S = start + torch.arange(keys_1GSE.shape[2], device=position_C.device)
    is_seen_CS = (slot_S <= position_C[:, None]) & (slot_S >= first_C[:, None])
    return attend(queries_CHE[None], keys_1GSE, values_1GSE, is_seen_CS[None], path_CKE[None])[0]


def attend_to_cache(queries_BPHE: Tensor, path_BPKE: Tensor, cache: DraftCache) -> Tensor:
    """Attend from P nodes of each text to the cache and to the K nodes of their own path."""
    slot_S = torch.arange(cache.keys_BGSE.shape[2], device=cache.length_B.device)
    is_seen_B1S = slot_S < cache.length_B[:, None, None]
    return attend(queries_BPHE, cache.keys_BGSE, cache.values_BGSE, is_seen_B1S, path_BPKE)


def attend(
    queries_BPHE: Tensor,
    keys_BGSE: Tensor,
    values_BGSE: Tensor,
    is_seen_BPS: Tensor,
    path_BPKE: Tensor,
) -> Tensor:
    """Attend to keys with a mask, and to the K keys of each query's own path.

    `path_BPKE` [B, P, K, 2, G, E] holds keys and values. The mask may be [B, 1, S].
    """
    num_groups, num_slots, size = keys_BGSE.shape[1:]
    queries_BPGRE = queries_BPHE.unflatten(2, (num_groups, -1)) / math.sqrt(size)
    path_keys_BPKGE, path_values_BPKGE = path_BPKE.unbind(3)
    scores_BGRPS = einsum("bpgre,bgse->bgrps", queries_BPGRE, keys_BGSE)
    # Unlike masked_fill, an addition costs nothing in the backward pass.
    unseen_BPS = torch.zeros_like(is_seen_BPS, dtype=keys_BGSE.dtype)
    scores_BGRPS += unseen_BPS.masked_fill_(~is_seen_BPS, -torch.inf)[:, None, None]
    scores_BGRPK = einsum("bpgre,bpkge->bgrpk", queries_BPGRE, path_keys_BPKGE)
    shares = torch.cat((scores_BGRPS, scores_BGRPK), -1).float().softmax(-1).to(queries_BPHE.dtype)
    attended_BPGRE = einsum("bgrps,bgse->bpgre", shares[..., :num_slots], values_BGSE)
    on_path_BPGRE = einsum("bgrpk,bpkge->bpgre", shares[..., num_slots:], path_values_BPKGE)
    return (attended_BPGRE + on_path_BPGRE).flatten(2, 3)


def _key_value_heads(attention_heads: int) -> int:
    """Return the number of key and value heads: as many as query heads, and at most 8."""
    if attention_heads < KEY_VALUE_HEADS:
        return attention_heads
    return math.gcd(attention_heads, KEY_VALUE_HEADS)


def _attention_heads(most: int) -> int:
    """Return the default number of query heads: `most`, from 8 on as a multiple of 8."""
    if most < KEY_VALUE_HEADS:
        return max(1, most)
    return most - most % KEY_VALUE_HEADS


def layers_of(wanted: Sequence[int] | str, num_layers: int) -> tuple[int, ...]:
    """Return the configured layers of a target of `num_layers`, ascending; see `Eagle3Config`.

    Raises ConfigError for a layer that the target does not have.
    """
    if wanted == "last":
        return (num_layers,)
    if isinstance(wanted, str):
        paper = {2, num_layers // 2, num_layers - 3}  # section 4 and the authors' code
        layers = sorted(layer for layer in paper if 1 <= layer <= num_layers)
        return tuple(layers or [num_layers])
    if max(wanted) > num_layers:
        raise ConfigError(
            f"The target has {num_layers} layers, and layer {max(wanted)} is configured.",
            "train.eagle3.layers",
            f"Set train.eagle3.layers to layers from 1 to {num_layers}.",
        )
    return tuple(sorted(set(wanted)))
