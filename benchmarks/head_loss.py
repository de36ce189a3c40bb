"""Benchmark of the heads' loss in chunks of logits over the loss with full logits.

Claim: at V = 128k the loss in chunks is about as fast, in at most half of the memory.

Measured in turns, forward and backward, with bfloat16 products and fp32 weights as on a GPU:
`weighted_cross_entropy`, which holds a chunk of logits at a time, and torch's own `cross_entropy`
on the logits of all positions, differentiated by autograd. Both compute the softmax in fp32.

Letters: N rows (positions), D hidden size, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.arithmetic import peak_memory_gb, reset_peak_memory
from benchmarks.claims import Claim, Result, in_turns, speed_ratio
from pipeline.heads.losses import weighted_cross_entropy

NUM_HEADS = 2
VOCAB_SIZE = 128_256
HIDDEN_SIZE = 64
NUM_POSITIONS = 1024
ROUNDS = 3


@dataclass(frozen=True)
class Inputs:
    """The inputs of the heads' loss: states [K, N, D], lm_heads [K, V, D], labels [K, N].

    States are in bfloat16, lm_heads in fp32.
    """

    hidden_KND: Tensor
    lm_head_KVD: Tensor
    labels_KN: Tensor

    @classmethod
    def random(cls, vocab_size: int, num_positions: int) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        hidden_KND = torch.randn(NUM_HEADS, num_positions, HIDDEN_SIZE, generator=generator)
        lm_head_KVD = torch.randn(NUM_HEADS, vocab_size, HIDDEN_SIZE, generator=generator)
        labels_KN = torch.randint(vocab_size, (NUM_HEADS, num_positions), generator=generator)
        return cls(
            hidden_KND.bfloat16().requires_grad_(),
            (0.05 * lm_head_KVD).requires_grad_(),
            labels_KN,
        )


def in_chunks(inputs: Inputs) -> Tensor:
    """Return the sum of the heads' losses, computed in chunks of logits."""
    weights_K = torch.ones(len(inputs.labels_KN), device=inputs.labels_KN.device)
    loss, _ = weighted_cross_entropy(
        inputs.hidden_KND, inputs.lm_head_KVD, inputs.labels_KN, None, weights_K
    )
    return loss


def with_full_logits(inputs: Inputs) -> Tensor:
    """Return the sum of the heads' losses, with the logits of all positions in memory."""
    weight_KVD = inputs.lm_head_KVD.to(inputs.hidden_KND.dtype)
    logits_KNV = (inputs.hidden_KND @ weight_KVD.mT).float()
    return cross_entropy(logits_KNV.flatten(0, 1), inputs.labels_KN.flatten(), reduction="sum")


class Side:
    """A way to compute the heads' loss and gradients; `memory_gb` is the peak memory."""

    def __init__(self, loss: Callable[[Inputs], Tensor], inputs: Inputs):
        self._loss = loss
        self._inputs = inputs
        self.memory_gb = 0.0

    def run(self) -> float:
        """Return the seconds of a forward and a backward."""
        self._inputs.hidden_KND.grad = None
        self._inputs.lm_head_KVD.grad = None
        before_gb = reset_peak_memory(torch.device("cpu"))
        started = perf_counter()
        self._loss(self._inputs).backward()
        seconds = perf_counter() - started
        self.memory_gb = max(self.memory_gb, peak_memory_gb(torch.device("cpu")) - before_gb)
        return seconds


def measure(*, tiny: bool = False) -> Result:
    """Measure time and memory of the loss in chunks and with full logits, in turns."""
    vocab_size, num_positions = (300, 16) if tiny else (VOCAB_SIZE, NUM_POSITIONS)
    inputs = Inputs.random(vocab_size, num_positions)
    sides = {
        "in chunks": Side(in_chunks, inputs),
        "full logits": Side(with_full_logits, inputs),
    }
    runs = {name: side.run for name, side in sides.items()}
    seconds = in_turns(runs, rounds=1 if tiny else ROUNDS)
    what = f"a head's loss in chunks over full logits, V = {vocab_size:,}"
    num_labels = inputs.labels_KN.numel()
    time = speed_ratio(what, seconds, num_labels, "labels", aim=0.95)
    memory_gb = {name: side.memory_gb for name, side in sides.items()}
    least_gb = 1e-3  # a tiny loss may take no page more
    memory = Claim(
        f"memory of {what}",
        max(memory_gb["in chunks"], least_gb) / max(memory_gb["full logits"], least_gb),
        aim=0.5,
        at_most=True,
        sides={f"{name}, GB": used for name, used in memory_gb.items()},
    )
    facts = {"heads": NUM_HEADS, "hidden_size": HIDDEN_SIZE, "positions": num_positions}
    return Result([time, memory], facts)
