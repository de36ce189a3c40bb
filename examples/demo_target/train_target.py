"""Training of the demo target in about a minute on two cores.

The choices that make this possible, in held-out nats per token after equal CPU time, on twice as
many topics as the seeds have now: matrices are trained with Muon (0.56, against 1.09 with AdamW);
embeddings start at unit size with a high learning rate, and the blocks' outputs at zero (1.3
against 2.2). Batches are small, and bfloat16 is used if the CPU supports it.

A batch has up to four conversations, one per row. After eight such batches follows one row of
several conversations, as long as the context, so that every position is trained. Training is
reproducible on one kind of CPU: it takes `num_steps` however long they last.

Muon: Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon. Torch's own Muon is not used:
it always computes in bfloat16, which takes 20 times as long where the CPU emulates it.

Dimensions: B rows, T positions, V vocabulary, N matrices of one shape, R and C their rows and
columns.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ROWS_PER_STEP, POOL_SIZE = 4, 32
LENGTH_MULTIPLE = 64
LONG_ROW_LENGTH = 1024  # tokens of the row of several conversations that follows each pool
MATRIX_LR, EMBEDDING_LR, OTHER_LR = 0.03, 0.12, 0.006
WARMUP_SHARE, DECAY_SHARE = 0.02, 0.6

ReportStep = Callable[[int, int, float], None]  # (steps done, steps planned, loss)


def train(
    model: LlamaForCausalLM,
    documents: list[torch.Tensor],
    *,
    num_steps: int,
    progress: ReportStep | None = None,
) -> dict:
    """Train a new model in place on documents, in an order that torch's global generator decides.

    Args:
        model: On the CPU, in fp32, as transformers initializes it.
        documents: Token ids [T], one tensor per conversation.
        num_steps: The number of steps.
        progress: Called after each step.

    Returns:
        Steps, tokens, tokens per second, the mean loss of the last tenth of the steps, and the
        precision.
    """
    begun = time.monotonic()
    half = fast_bfloat16()
    prepare(model)
    optimizers = new_optimizers(model, torch.bfloat16 if half else torch.float32)
    losses: list[float] = []
    num_tokens = 0
    model.train()
    for ids_BT, labels_BT in islice(batches(documents), num_steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update(optimizers, learning_rate_share(len(losses) / num_steps))
        losses.append(loss.item())
        num_tokens += int((labels_BT >= 0).sum())
        if progress:
            progress(len(losses), num_steps, losses[-1])
    model.eval()
    last = losses[-max(1, len(losses) // 10) :]
    return {
        "steps": len(losses),
        "tokens": num_tokens,
        "tokens_per_second": num_tokens / (time.monotonic() - begun),
        "final_loss": sum(last) / len(last) if last else math.nan,
        "precision": "bfloat16" if half else "float32",
    }


def update(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Take a step with every optimizer, at a share of its peak learning rates."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        optimizer.step()
        optimizer.zero_grad()


def fast_bfloat16() -> bool:
    """Return whether the CPU computes bfloat16 in hardware.

    If so, training is 2.5 times as fast. Emulated bfloat16 is slower than fp32.
    """
    able = torch.cpu.get_capabilities()
    return bool(able.get("avx512_bf16") or able.get("amx_bf16"))


@torch.no_grad()
def prepare(model: LlamaForCausalLM) -> None:
    """Initialize embeddings with unit variance, and blocks and lm_head with zero output."""
    model.model.embed_tokens.weight.normal_()
    model.lm_head.weight.zero_()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


def new_optimizers(model: LlamaForCausalLM, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Create Muon for the blocks' matrices, and Adam for embeddings, norms and lm_head.

    Each parameter group has its `peak_lr`.
    """
    matrices = [each for each in model.model.layers.parameters() if each.dim() == 2]
    norms = [each for each in model.parameters() if each.dim() == 1]
    groups = [
        {"params": [model.model.embed_tokens.weight], "peak_lr": EMBEDDING_LR},
        {"params": [model.lm_head.weight, *norms], "peak_lr": OTHER_LR},
    ]
    return [Muon(matrices, dtype), torch.optim.Adam(groups, betas=(0.9, 0.95), fused=True)]


class Muon(torch.optim.Optimizer):
    """The optimizer Muon: Nesterov momentum with orthogonalized updates."""

    def __init__(self, matrices: list[torch.Tensor], dtype: torch.dtype, *, momentum: float = 0.95):
        by_shape = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.shape].append(matrix)
        defaults = {"lr": 0.0, "peak_lr": MATRIX_LR, "momentum": momentum, "dtype": dtype}
        super().__init__([{"params": alike} for alike in by_shape.values()], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every matrix; matrices of one shape are orthogonalized in one batch."""
        for group in self.param_groups:
            gradient_NRC = torch.stack([matrix.grad for matrix in group["params"]])
            state = self.state[group["params"][0]]
            momentum_NRC = state.setdefault("momentum_NRC", torch.zeros_like(gradient_NRC))
            momentum_NRC.lerp_(gradient_NRC, 1 - group["momentum"])
            update_NRC = orthogonalize(
                gradient_NRC.lerp(momentum_NRC, group["momentum"]), group["dtype"]
            )
            rows, columns = update_NRC.shape[1:]
            scale = max(1, rows / columns) ** 0.5
            for matrix, update_RC in zip(group["params"], update_NRC, strict=True):
                matrix.sub_(update_RC, alpha=group["lr"] * scale)


def orthogonalize(
    matrices_NRC: torch.Tensor, dtype: torch.dtype, num_iterations: int = 5
) -> torch.Tensor:
    """Replace the singular values of matrices by values near 1 (0.7 to 1.2); keep the vectors.

    The method is a quintic Newton-Schulz iteration, computed in `dtype`.
    """
    wide = matrices_NRC.shape[1] <= matrices_NRC.shape[2]
    x_NRC = matrices_NRC.to(dtype) if wide else matrices_NRC.to(dtype).mT
    x_NRC = x_NRC / x_NRC.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(num_iterations):
        gram_NRR = x_NRC @ x_NRC.mT
        quintic_NRR = torch.baddbmm(gram_NRR, gram_NRR, gram_NRR, beta=-4.7750, alpha=2.0315)
        x_NRC = torch.baddbmm(x_NRC, quintic_NRR, x_NRC, beta=3.4445)
    return (x_NRC if wide else x_NRC.mT).to(matrices_NRC.dtype)


def learning_rate_share(steps_share: float) -> float:
    """Return the share of the peak learning rates: short warmup, plateau, linear decay to 0.02.

    `steps_share` is the number of steps done over all steps.
    """
    warmup = (steps_share + 0.001) / WARMUP_SHARE
    decay = max(0.02, (1 - steps_share) / DECAY_SHARE)
    return min(1.0, warmup, decay)


def batches(documents: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield token ids [B, T] and labels [B, T] without end; each row is one document, padded.

    Each epoch has a new order. It is divided into pools, in which documents of similar length are
    batched. After each pool follows a batch with one row of several documents.
    """
    while True:
        order = torch.randperm(len(documents)).tolist()
        pools = [order[start : start + POOL_SIZE] for start in range(0, len(order), POOL_SIZE)]
        for pool in pools:
            pool.sort(key=lambda index: len(documents[index]))
            groups = [
                pool[start : start + ROWS_PER_STEP] for start in range(0, len(pool), ROWS_PER_STEP)
            ]
            for place in torch.randperm(len(groups)).tolist():
                yield pad([documents[index] for index in groups[place]])
            yield pad([torch.cat([documents[index] for index in pool])[:LONG_ROW_LENGTH]])


def pad(rows: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad rows to ids [B, T], and make labels [B, T]: the next token of each position, or -100.

    T is a multiple of 64, because CPU kernels are prepared and cached per shape.
    """
    ids_BT = pad_sequence(rows, batch_first=True)
    labels_BT = pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=-100)
    missing = -ids_BT.shape[1] % LENGTH_MULTIPLE
    return F.pad(ids_BT, (0, missing)), F.pad(labels_BT, (0, missing + 1), value=-100)
