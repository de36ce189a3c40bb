"""How well heads do on held-out conversations: each head's loss, and how often its first guesses are right.

Letters: K heads, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor

from pipeline.conversations.conversation import Role
from pipeline.medusa.accuracy import Score, score
from pipeline.medusa.heads import MedusaHeads
from pipeline.training.checkpoints import load_heads
from pipeline.training.features import FeatureRows
from pipeline.training.loading import load_batches
from pipeline.training.plan import EpochPlan
from pipeline.training.world import World

SPLIT = "calibrate"
MAX_POSITIONS = 131_072  # an accuracy's standard error is then under 0.15 %
TOP = 5
BATCH_TOKENS = 8192  # of `held_out_hits`; in fp32 its states and one head's logits fit beside any heads


def evaluate(
    heads: MedusaHeads, rows: FeatureRows, world: World, *, batch_tokens: int, dtype: torch.dtype
) -> list[dict[str, float]]:
    """Per head {loss, top1, …, top5} over the held-out rows, all workers together; empty where no row is held out.

    Matrix products run in `dtype`. At most `MAX_POSITIONS` positions are looked at, always the same ones.
    """
    losses_K, hits_KR, counts_K = _score(heads, rows, TOP, batch_tokens, world, dtype)
    if not counts_K.any():
        return []
    means_KR = torch.cat([losses_K[:, None], hits_KR], 1) / counts_K.clamp(min=1)[:, None]
    names = ["loss", *(f"top{rank + 1}" for rank in range(TOP))]
    return [dict(zip(names, row, strict=True)) for row in means_KR.tolist()]


def held_out_hits(
    shards: Sequence[str],
    fingerprint: str,
    heads: str,
    roles: Collection[Role],
    top: int,
    device: str,
) -> tuple[Tensor, Tensor]:
    """How often trained heads' first `top` guesses are right on held-out rows: (hits [K, R], cumulative, labels [K]).

    Args:
        shards, fingerprint, roles: As in `FeatureRows`.
        heads: Path of the trained heads.

    At most `MAX_POSITIONS` positions are looked at, in fp32 on `device`.
    """
    module = load_heads(Path(heads)).to(device)
    config = module.config
    rows = FeatureRows(
        shards,
        fingerprint=fingerprint,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        roles=roles,
    )
    _, hits_KR, counts_K = _score(module, rows, top, BATCH_TOKENS, World(), torch.float32)
    return hits_KR.cpu(), counts_K.cpu()


def _score(
    heads: MedusaHeads, rows: FeatureRows, top: int, batch_tokens: int, world: World, dtype: torch.dtype
) -> Score:
    """The score over the held-out positions of all workers."""
    device, num_heads = heads.block_weight.device, heads.config.num_heads
    plan = EpochPlan(rows.lengths(SPLIT), batch_tokens=batch_tokens, seed=0, limit=MAX_POSITIONS)
    total = Score.zero(num_heads, top, device)
    steps = range(plan.num_steps)
    for batch in load_batches(rows, plan, steps, rank=world.rank, world_size=world.size, device=device):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            part = score(heads, batch.hidden_ND, batch.labels_KN, top)
        for sums, more in zip(total, part, strict=True):
            sums += more
    world.sum_all(total)
    return total
