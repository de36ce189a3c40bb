"""Benchmark of the EAGLE-3 layer: its attention in training, and its drafts in native decoding.

Training: `Heads.weighted_loss` and its backward pass, which compute attention in blocks, over the
same loss with one mask [N, S + k N] of all keys in each step k. Decoding: a step of native decoding
with EAGLE-3 heads over a step with recurrent heads, on one random target. Sides take turns, on one
thread.

Letters: S positions of packed rows, N positions with labels, K steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import targets
from benchmarks.arithmetic import peak_memory_gb, reset_peak_memory
from benchmarks.claims import Claim, Result, in_turns, ratio, speed_ratio
from benchmarks.gpu_decoding import likely_tree
from benchmarks.rows import WRITTEN_SHARE
from pipeline.config import TrainConfig
from pipeline.decoding.decoder import Decoder
from pipeline.decoding.tree import cartesian_tree
from pipeline.heads import eagle3
from pipeline.heads.eagle3 import Eagle3Heads
from pipeline.heads.kind import Heads, TargetWeights
from pipeline.heads.kinds import head_kind
from pipeline.heads.rows import Rows
from pipeline.heads.shapes import Eagle3Shape

STEPS = 5
SHAPE = Eagle3Shape(
    256, 1024, STEPS, layers=(2, 8, 13), intermediate_size=512, attention_heads=4, key_value_heads=2
)
CPU = torch.device("cpu")
ROUNDS = 3
TREE = likely_tree(31)


def with_full_masks(
    queries_NHE: Tensor,
    keys_1GSE: Tensor,
    values_1GSE: Tensor,
    path_NKE: Tensor,
    rows: Rows,
    _: object,
) -> Tensor:
    """Compute `eagle3.attend_to_rows` with one mask over the keys of all steps and positions."""
    position_N1 = rows.learned_N[:, None]
    slot_S = torch.arange(len(rows.start_S))
    is_seen_NS = (slot_S <= position_N1) & (slot_S >= rows.start_S[position_N1])
    is_own_NN = torch.eye(len(position_N1), dtype=torch.bool)
    path_keys_GZE, path_values_GZE = path_NKE.permute(2, 3, 1, 0, 4).flatten(2, 3)
    attended_1HNE = scaled_dot_product_attention(
        queries_NHE.transpose(0, 1)[None],
        torch.cat((keys_1GSE, path_keys_GZE[None]), 2),
        torch.cat((values_1GSE, path_values_GZE[None]), 2),
        torch.cat([is_seen_NS, *[is_own_NN] * path_NKE.shape[1]], 1),
        enable_gqa=True,
    )
    return attended_1HNE[0].transpose(0, 1)


class TrainingStep:
    """A loss of random rows and its gradients, by one way to attend.

    Attributes:
        loss: The last loss.
        memory_gb: The peak memory of a step, beyond weights and inputs.
    """

    def __init__(self, num_rows: int, num_tokens: int, attend: Callable[..., Tensor]):
        generator = torch.Generator().manual_seed(0)
        parts = []
        labels = []
        first = round(num_tokens * (1 - WRITTEN_SHARE))
        for _ in range(num_rows):
            states_TX = torch.randn(num_tokens, SHAPE.row_size, generator=generator)
            ids_T = torch.randint(SHAPE.vocab_size, (num_tokens + STEPS + 1,), generator=generator)
            learned_N = torch.arange(first, num_tokens)
            parts.append(Rows.of_text(states_TX, ids_T, learned_N))
            labels.append(ids_T[2:].unfold(0, STEPS, 1)[learned_N].T)
        self._rows = Rows.pack(parts)
        self._labels_KN = torch.cat(labels, 1)
        self._attend = attend
        torch.manual_seed(0)
        embedding = torch.randn(SHAPE.vocab_size, SHAPE.hidden_size) / 20
        self._heads = Eagle3Heads.initial(
            SHAPE, TargetWeights(lambda: embedding, lambda: embedding)
        )
        for weight in (self._heads.o, self._heads.down):  # zeros at the start of a training
            weight.data.normal_(std=weight.shape[1] ** -0.5)
        self.loss = 0.0
        self.memory_gb = 0.0

    def run(self) -> float:
        """Return the seconds of a forward and a backward."""
        self._heads.zero_grad()
        rows = self._rows
        next_N = rows.tokens_S[rows.learned_N]
        before_gb = reset_peak_memory(CPU)
        started = perf_counter()
        with patch.object(eagle3, "attend_to_rows", self._attend):
            loss, _ = self._heads.weighted_loss(
                torch.empty(len(next_N), 0), next_N, self._labels_KN, None, torch.ones(STEPS), rows
            )
            loss.backward()
        seconds = perf_counter() - started
        self.memory_gb = max(self.memory_gb, peak_memory_gb(CPU) - before_gb)
        self.loss = float(loss.detach()) / self._labels_KN.numel()
        return seconds


def training(what: str, num_rows: int, num_tokens: int, rounds: int) -> tuple[list[Claim], float]:
    """Return the claims of time and memory of a training step, and the losses' relative gap."""
    sides = {
        "in blocks": TrainingStep(num_rows, num_tokens, eagle3.attend_to_rows),
        "full masks": TrainingStep(num_rows, num_tokens, with_full_masks),
    }
    seconds = in_turns({name: side.run for name, side in sides.items()}, rounds)
    what = f"attention in blocks over full masks, {what}"
    ours, theirs = sides.values()
    least_gb = 1e-3  # a tiny step may take no page more
    memory = Claim(
        f"memory of {what}",
        max(ours.memory_gb, least_gb) / max(theirs.memory_gb, least_gb),
        at_most=True,
        aim=1.0,
        sides={f"{name}, GB": side.memory_gb for name, side in sides.items()},
    )
    speed = speed_ratio(what, seconds, num_rows * num_tokens, "tokens", aim=1.0)
    return [speed, memory], abs(ours.loss / theirs.loss - 1)


def decoding(shape: dict[str, int], new_tokens: int, rounds: int) -> list[Claim]:
    """Return the claims of a decoding step with EAGLE-3 heads over one with recurrent heads."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    prompt = torch.randint(model.config.vocab_size, (64,)).tolist()
    claims = []
    for name, tree in (("a chain of 5", cartesian_tree((1,) * STEPS)), ("31 nodes", TREE)):
        sides = {}
        for kind in ("eagle3", "recurrent"):
            decoder = Decoder(model, initial_heads(kind, model), tree, eos_token_ids=())
            sides[kind] = partial(step_seconds, decoder, prompt, new_tokens)
        ours, theirs = in_turns(sides, rounds).values()
        in_ms = {"eagle3, ms": 1e3 * median(ours), "recurrent, ms": 1e3 * median(theirs)}
        claims.append(ratio(f"a decoding step, eagle3 over recurrent, {name}", ours, theirs, in_ms))
    return claims


def initial_heads(kind: str, model: LlamaForCausalLM) -> Heads:
    """Return untrained heads of a kind for the target, as `auto` shapes them."""
    config = model.config
    shape = head_kind(kind).shape_of(
        TrainConfig(heads=kind, num_heads=STEPS),
        config.hidden_size,
        config.vocab_size,
        config.num_hidden_layers,
    )
    weights = TargetWeights(lambda: model.lm_head.weight, lambda: model.model.embed_tokens.weight)
    return head_kind(kind).initial(shape, weights).requires_grad_(False)


def step_seconds(decoder: Decoder, prompt: list[int], new_tokens: int) -> float:
    """Return the mean seconds of a decoding step."""
    decoded = decoder.generate(prompt, new_tokens)
    return decoded.seconds / decoded.num_steps


def measure(*, tiny: bool = False) -> Result:
    """Measure training with packed short rows and with a long row, and decoding."""
    torch.set_num_threads(1)
    rounds = 1 if tiny else ROUNDS
    cases = {"short rows": (2, 16) if tiny else (20, 100), "a long row": (1, 48 if tiny else 2048)}
    claims: list[Claim] = []
    gaps = {}
    for what, (num_rows, num_tokens) in cases.items():
        found, gaps[what] = training(what, num_rows, num_tokens, rounds)
        claims += found
    shape = targets.TINY if tiny else targets.BACKBONE
    claims += decoding(shape, 8 if tiny else 48, rounds)
    return Result(claims, {"relative_loss_difference": gaps, "queries_of_a_block": eagle3.QUERIES})
