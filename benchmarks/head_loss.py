"""Claim: a head's loss and gradients at V = 128k take 1/1.2 of the time, and of the bytes moved,
that they took before.

Measured: `summed_cross_entropy` of untied heads of a small hidden size, forward and backward, with
bf16 products and fp32 weights as on a GPU. Against: the straightforward path that it replaced,
which holds a chunk's logits in fp32 twice and whose [V, D] product of every chunk is made in bf16,
read and added to the fp32 sum. Both may hold as many bytes of logits; told beside it is the older
path with half of that, as it was. In fp32 there is no such product to save, and the claim has no
aim.

Bytes moved are counted, not measured: all that torch's operators read and write while it runs, each
tensor once per operator, whatever of it a cache keeps; lookups by what they pick. Both sides are
counted by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.claims import Claim, Result, in_turns, speed_ratio
from pipeline.heads.losses import chunk_bytes_on, summed_cross_entropy

AIM = 1.2
NUM_HEADS, VOCAB_SIZE, HIDDEN_SIZE, NUM_POSITIONS, ROUNDS = 2, 128_256, 64, 1024, 3

aten = torch.ops.aten
WRITE_ONLY = {aten.zero_, aten.fill_, aten.copy_}
PICKS = {
    aten.gather,
    aten.index,
    aten.index_select,
    aten.scatter_,
    aten.index_put_,
    aten._index_put_impl_,
}

Loss = Callable[
    [Tensor, Tensor, Tensor], object
]  # of states [K, N, D], lm_heads [K, V, D] and labels [K, N]


def measure(*, tiny: bool = False) -> Result:
    """Each precision with the sides in turns."""
    vocab_size, num_positions = (300, 16) if tiny else (VOCAB_SIZE, NUM_POSITIONS)
    claims: list[Claim] = []
    for dtype in (torch.bfloat16, torch.float32):
        inputs = made_inputs(vocab_size, num_positions, dtype)
        held = 1 << 14 if tiny else chunk_bytes_on(torch.device("cpu"))
        claims += _claims(inputs, dtype, held, rounds=1 if tiny else ROUNDS)
    facts = {
        "heads": NUM_HEADS,
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "positions": num_positions,
    }
    return Result(claims, facts)


def made_inputs(
    vocab_size: int, num_positions: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_KND = (
        torch.randn(NUM_HEADS, num_positions, HIDDEN_SIZE, generator=generator)
        .to(dtype)
        .requires_grad_()
    )
    lm_head_KVD = (
        0.05 * torch.randn(NUM_HEADS, vocab_size, HIDDEN_SIZE, generator=generator)
    ).requires_grad_()
    return (
        hidden_KND,
        lm_head_KVD,
        torch.randint(vocab_size, (NUM_HEADS, num_positions), generator=generator),
    )


def _claims(
    inputs: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, held: int, *, rounds: int
) -> list[Claim]:
    labels, precision = inputs[2].numel(), str(dtype).removeprefix("torch.")
    aim = AIM if dtype == torch.bfloat16 else None
    losses: dict[str, Loss] = {
        "ours": lambda *of: summed_cross_entropy(*of, chunk_bytes=held).sum().backward(),
        "before": lambda *of: loss_of_before(*of, held),
        "before, half held": lambda *of: loss_of_before(*of, held // 2),
    }
    moved = {name: bytes_moved(loss, inputs) / labels for name, loss in losses.items()}
    seconds = in_turns(
        {name: lambda loss=loss: _seconds(loss, inputs) for name, loss in losses.items()}, rounds
    )
    claims = []
    for other in ("before", "before, half held"):
        against = f"a head's loss against {other}, V = {inputs[1].shape[1]:,}, {precision}"
        both = {"ours": seconds["ours"], other: seconds[other]}
        wanted = aim if other == "before" else None
        claims.append(speed_ratio(f"time of {against}", both, labels, "labels", aim=wanted))
        sides = {f"{name}, MB/label": moved[name] / 1e6 for name in both}
        claims.append(
            Claim(
                f"bytes moved by {against}", moved[other] / moved["ours"], aim=wanted, sides=sides
            )
        )
    return claims


def _seconds(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> float:
    for tensor in inputs:
        tensor.grad = None
    started = perf_counter()
    loss(*inputs)
    return perf_counter() - started


def loss_of_before(
    hidden_KND: Tensor, lm_head_KVD: Tensor, labels_KN: Tensor, chunk_bytes: int
) -> Tensor:
    """The sums [K], and gradients of their sum in `grad`; every position has a label."""
    dtype, (num_heads, vocab_size, _) = hidden_KND.dtype, lm_head_KVD.shape
    of_logit = dtype.itemsize + 4 * (
        1 if dtype == torch.float32 else 2
    )  # with log q, and the logit converted to fp32
    num_rows = max(1, min(chunk_bytes // (vocab_size * of_logit), labels_KN.numel()))
    sums_K = torch.zeros(num_heads)
    with torch.no_grad():
        grad_hidden_KND, grad_KVD = torch.zeros_like(hidden_KND), torch.zeros_like(lm_head_KVD)
        logits_buffer = hidden_KND.new_empty(num_rows, vocab_size)
        log_q_buffer = logits_buffer.new_empty(num_rows, vocab_size, dtype=torch.float32)
        for head in range(num_heads):
            for rows in torch.arange(labels_KN.shape[1]).split(num_rows):
                weight_VD, hidden_CD = lm_head_KVD[head].to(dtype), hidden_KND[head][rows]
                labels_C1 = labels_KN[head][rows, None]
                logits_CV = torch.mm(hidden_CD, weight_VD.t(), out=logits_buffer[: len(rows)])
                log_q_CV = torch.log_softmax(
                    logits_CV, 1, dtype=torch.float32, out=log_q_buffer[: len(rows)]
                )
                label_log_q_C1 = log_q_CV.gather(1, labels_C1)
                sums_K[head] -= label_log_q_C1.sum()
                grad_CV = torch.exp(log_q_CV, out=logits_CV)
                grad_CV.scatter_(1, labels_C1, torch.expm1(label_log_q_C1).to(dtype))
                grad_hidden_KND[head][rows] = grad_CV @ weight_VD
                if dtype == torch.float32:
                    grad_KVD[head].addmm_(grad_CV.t(), hidden_CD)
                else:
                    grad_KVD[head].add_(grad_CV.t() @ hidden_CD)
    hidden_KND.grad, lm_head_KVD.grad = grad_hidden_KND, grad_KVD
    return sums_K


class _Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = operator(*args, **(kwargs or {}))
        self.num_bytes += _moved(operator, args, kwargs or {}, made)
        return made


def bytes_moved(loss: Loss, inputs: tuple[Tensor, Tensor, Tensor]) -> int:
    """What a loss moves, forward and backward."""
    for tensor in inputs:
        tensor.grad = None
    with _Traffic() as traffic:
        loss(*inputs)
    return traffic.num_bytes


def _moved(operator: Any, args: Any, kwargs: dict[str, Any], made: Any) -> int:
    packet, schema = operator.overloadpacket, operator._schema
    outputs = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
    inputs = {
        argument.name: value for argument, value in zip(schema.arguments, args, strict=False)
    } | kwargs
    written = {
        argument.name
        for argument in schema.arguments
        if argument.alias_info and argument.alias_info.is_write
    }
    makes = [returned for returned in schema.returns if returned.alias_info is None]
    if (
        not (written or makes)
        or packet.__name__.startswith("empty")
        or packet.__name__.startswith("new_empty")
    ):
        return 0  # a view, or memory that nobody has written yet
    if packet in PICKS:
        picked = inputs.get("src", inputs.get("values", outputs[0]))
        return 2 * (picked if isinstance(picked, Tensor) else outputs[0]).nbytes
    is_template = packet.__name__.startswith("new_") or packet.__name__.endswith("_like")
    overwritten = {"out"} | ({"self"} if is_template or packet in WRITE_ONLY else set())
    read = [
        leaf
        for name, value in inputs.items()
        if name not in overwritten
        for leaf in tree_leaves(value)
    ]
    return sum(leaf.nbytes for leaf in [*read, *outputs] if isinstance(leaf, Tensor))
