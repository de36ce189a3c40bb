"""The EAGLE-3 layer: against transformers' own Llama layer, and training against decoding token by
token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from pipeline.config import TrainConfig
from pipeline.conversations.spans import IGNORED
from pipeline.heads import eagle3
from pipeline.heads.accuracy import NO_LABEL, label_ranks, score_guesses
from pipeline.heads.eagle3 import Eagle3Heads
from pipeline.heads.rows import SPAN, Rows
from pipeline.heads.shapes import Eagle3Shape

SIZE, VOCAB, STEPS = 12, 11, 3
SHAPE = Eagle3Shape(
    SIZE,
    VOCAB,
    STEPS,
    layers=(1, 3),
    intermediate_size=20,
    attention_heads=4,
    key_value_heads=2,
    head_size=6,
    rope_theta=100.0,
)


def random_layer(seed: int = 0, *, norm_before_residual: bool = False) -> Eagle3Heads:
    generator = torch.Generator().manual_seed(seed)
    shape = replace(SHAPE, norm_before_residual=norm_before_residual)
    heads = Eagle3Heads(shape, dtype=torch.float64)
    for parameter in heads.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2
    return heads


class Text(NamedTuple):
    """A row: tokens, the states that are read before the last of them, and its spans."""

    ids: list[int]
    states_TX: Tensor
    spans: list[tuple[int, int]]

    def labels(self, num_steps: int) -> dict[int, list[int]]:
        """The labels of each position that has one for step 0."""
        found = {}
        for start, end in self.spans:
            for position in range(start - 1, end - 2):
                later = self.ids[position + 2 : end][:num_steps]
                found[position] = later + [IGNORED] * (num_steps - len(later))
        return found


@st.composite
def texts(draw) -> list[Text]:
    """One to four rows of one or two spans, cut after their last position with a label."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        spans, length = [], 0
        for _ in range(draw(st.integers(1, 2))):
            start = length + draw(st.integers(1, 5))
            length = start + draw(st.integers(2, 9))
            spans.append((start, length))
        ids = torch.randint(VOCAB, (length,), generator=generator).tolist()
        states_TX = torch.randn(
            length - 2, SHAPE.row_size, generator=generator, dtype=torch.float64
        )
        found.append(Text(ids, states_TX, spans))
    return found


def packed(found: list[Text], num_steps: int) -> tuple[Tensor, Tensor, Rows]:
    """Next tokens, labels and rows, as `Heads.states` reads them."""
    following, starts, learned, labels = [], [], [], []
    for text in found:
        start, number = len(starts), len(text.states_TX)
        starts += [start] * number
        following += text.ids[1 : number + 1]
        learned += [start + position for position in text.labels(num_steps)]
        labels += text.labels(num_steps).values()
    tokens_S, learned_N = torch.tensor(following), torch.tensor(learned)
    states_SX = torch.cat([text.states_TX for text in found])
    rows = Rows(states_SX, tokens_S, torch.tensor(starts), learned_N)
    return tokens_S[learned_N], torch.tensor(labels).T, rows


def drafted(heads: Eagle3Heads, text: Text, position: int, tokens: list[int]) -> list[Tensor]:
    """The logits [V] of a chain that decodes from one position over these tokens."""
    read_1TX = text.states_TX[None, : position + 1]
    following_1T = torch.tensor([text.ids[1 : position + 2]])
    cache = heads.open_cache(1, position + 3)
    found_1D = heads.advance(read_1TX, following_1T, torch.tensor([position + 1]), cache)
    hidden_11D, found = found_1D[:, None], []
    for depth, token in enumerate(tokens):
        hidden_11D, logits_11V = heads.expand(hidden_11D, torch.tensor([[token]]), depth, cache)
        found.append(logits_11V[0, 0])
    return found


@given(texts(), st.integers(STEPS, 2 * STEPS), st.sampled_from([3, 512]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_training_computes_what_decoding_token_by_token_computes(
    found, num_steps, queries, norm_before_residual
):
    heads = random_layer(norm_before_residual=norm_before_residual)
    next_N, labels_KN, rows = packed(found, num_steps)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(eagle3, "QUERIES", queries)
        states_KND = heads.states(torch.empty(len(next_N), 0), next_N, labels_KN, rows)
        place = 0
        for text in found:
            for position, labels in text.labels(num_steps).items():
                known = [label for label in labels if label != IGNORED]
                tokens = [text.ids[position + 1], *known[:-1]]
                for step, logits_V in enumerate(drafted(heads, text, position, tokens)):
                    expected_V = heads.lm_head @ states_KND[step, place]
                    torch.testing.assert_close(logits_V, expected_V, rtol=1e-4, atol=1e-4)
                place += 1
    assert place == len(next_N)


def test_guesses_are_scored_by_the_states_of_their_rows():
    draw = torch.Generator().manual_seed(0)
    states_TX = torch.randn(8, SHAPE.row_size, generator=draw, dtype=torch.float64)
    heads, text = random_layer(), Text(list(range(10)), states_TX, [(2, 10)])
    next_N, labels_KN, rows = packed([text], STEPS)
    read = (heads, torch.empty(len(next_N), 0), next_N, labels_KN)
    logits_KNV = heads.states(*read[1:], rows) @ heads.lm_head.T
    ranks_KN = (logits_KNV > logits_KNV.gather(2, labels_KN.clamp(min=0)[..., None])).sum(2)
    ranks_KN[labels_KN == IGNORED] = NO_LABEL
    assert torch.equal(label_ranks(*read, VOCAB, rows), ranks_KN.to(torch.uint8))
    hits_K = (ranks_KN < 5).sum(1)
    assert torch.equal(score_guesses(*read, 5, rows).hits_KR[:, -1], hits_K)


@given(texts())
@settings(max_examples=10, deadline=None)
def test_blocks_of_queries_give_one_blocks_states_and_gradients(found):
    gradients = []
    for queries in (3, 512):
        heads = random_layer()
        next_N, labels_KN, rows = packed(found, STEPS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eagle3, "QUERIES", queries)
            states_KND = heads.states(torch.empty(len(next_N), 0), next_N, labels_KN, rows)
            (states_KND.sin().sum()).backward()
        trained = [each for each in heads.parameters() if each.requires_grad]
        gradients.append([states_KND.detach(), *(each.grad for each in trained[:-1])])
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


class WithTokens(nn.Module):
    """In place of a layer's input norm: put the tokens' normed embeddings before the states u."""

    def __init__(self, embedded_1TD: Tensor, u_1TD: Tensor):
        super().__init__()
        self.read_1TZ = torch.cat((embedded_1TD, u_1TD), -1)

    def forward(self, residual_1TD: Tensor) -> Tensor:
        return self.read_1TZ


@given(texts(), st.booleans())
@settings(max_examples=20, deadline=None)
def test_step_0_is_a_llama_layer_that_reads_tokens_and_states(found, norm_before_residual):
    """vLLM's EAGLE-3 layer, of transformers' parts."""
    heads = random_layer(norm_before_residual=norm_before_residual)
    named, exported = heads.named_tensors(), heads.engine_config(SHAPE, None, {})
    names = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes = {name: exported[name] for name in (*names, "rms_norm_eps")}
    rope = {"rope_type": "default", "rope_theta": exported["rope_theta"]}
    config = LlamaConfig(
        hidden_size=SIZE, **sizes, rope_parameters=rope, attn_implementation="eager"
    )
    layer = LlamaDecoderLayer(config, 0)
    for projection in ("q_proj", "k_proj", "v_proj"):
        old = getattr(layer.self_attn, projection)
        setattr(layer.self_attn, projection, nn.Linear(2 * SIZE, old.out_features, bias=False))
    prefix = "layers.0."
    norms = [f"{prefix}{name}_layernorm.weight" for name in ("input", "post_attention")]
    layer = layer.double()
    next_N, labels_KN, rows = packed(found, STEPS)
    with torch.no_grad():
        states_ND = heads.states(torch.empty(len(next_N), 0), next_N, labels_KN, rows)[0]
    expected = []
    for text in found:
        g_1TD = linear(text.states_TX[None], named["fc.weight"])
        u_1TD = rms_norm(g_1TD, (SIZE,), named[f"{prefix}hidden_norm.weight"], SHAPE.norm_eps)
        tokens_1T = torch.tensor([text.ids[1 : u_1TD.shape[1] + 1]])
        embedded_1TD = named["embed_tokens.weight"][tokens_1T]
        e_1TD = rms_norm(embedded_1TD, (SIZE,), named[norms[0]], SHAPE.norm_eps)
        layer.input_layernorm = WithTokens(e_1TD, u_1TD)
        weights = {
            name.removeprefix(prefix): value
            for name, value in named.items()
            if name.startswith(prefix) and "hidden_norm" not in name and name != norms[0]
        }
        layer.load_state_dict(weights)
        length = u_1TD.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        rotary = LlamaRotaryEmbedding(config)(u_1TD, torch.arange(length)[None])
        residual_1TD = u_1TD if norm_before_residual else g_1TD
        y_1TD = layer(residual_1TD, attention_mask=mask, position_embeddings=rotary)
        normed_1TD = rms_norm(y_1TD, (SIZE,), named["norm.weight"], SHAPE.norm_eps)
        expected.append(normed_1TD[0, list(text.labels(STEPS))])
    # Its norms and softmax are in fp32.
    torch.testing.assert_close(states_ND, torch.cat(expected).detach(), rtol=1e-4, atol=1e-4)


def test_a_worker_without_rows_computes_no_states():
    heads = random_layer()
    nothing = torch.empty(0, dtype=torch.int64)
    rows = Rows(torch.empty(0, SHAPE.row_size), nothing, nothing, nothing)
    states = heads.states(torch.empty(0, 0), nothing, torch.empty(STEPS, 0).long(), rows)
    states.sum().backward()
    assert states.shape == (STEPS, 0, SIZE)


@pytest.mark.parametrize(
    ("hidden_size", "queries", "shared"),
    [(192, 3, 3), (1536, 8, 8), (2880, 16, 8), (3584, 24, 8), (4096, 32, 8), (5120, 40, 8)],
)
def test_heads_of_large_targets_split_over_eight_gpus(hidden_size, queries, shared):
    """vLLM splits query heads and key and value heads evenly over the GPUs of the target."""
    shape = Eagle3Heads.shape_of(TrainConfig(heads="eagle3"), hidden_size, 100, 8)
    assert (shape.attention_heads, shape.key_value_heads) == (queries, shared)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 40)), min_size=1, max_size=12),
    st.integers(1, 16),
)
def test_blocks_see_their_rows_and_little_else(lengths, size):
    """Rows of a prompt, whose positions have no labels, and an answer, whose positions all have."""
    rows = Rows.pack(
        [
            Rows.of_text(
                torch.zeros(prompt + answer + 1, 1),
                torch.zeros(prompt + answer + 1, dtype=torch.int64),
                torch.arange(prompt, prompt + answer),
            )
            for prompt, answer in lengths
        ]
    )
    place = 0
    for number, keys in rows.blocks(size):
        of_block = rows.learned_N[place : place + number]
        assert keys.start <= int(rows.start_S[of_block].min())
        assert keys.stop == int(of_block.max()) + 1
        assert number <= size
        num_rows = len(rows.start_S[of_block].unique())
        assert num_rows == 1 or keys.stop - keys.start <= SPAN * size
        place += number
    assert place == len(rows.learned_N)
