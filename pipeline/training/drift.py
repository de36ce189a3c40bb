"""What tuning has made of a model, on held-out conversations: how good its heads are, how far it is from the original.

Letters: K heads, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from pipeline.heads.accuracy import Score, score
from pipeline.heads.kind import Heads
from pipeline.training import evaluate
from pipeline.training.adapted import Backbone
from pipeline.training.backbone_losses import Drift, measure_drift
from pipeline.training.epochs import part
from pipeline.training.task import TrainSpec, product_dtype
from pipeline.training.texts import Text, assemble_texts, pack
from pipeline.training.world import World


@torch.no_grad()
def evaluate_tuned(
    backbone: Backbone,
    heads: Heads,
    texts: Mapping[str, Sequence[Text]],
    spec: TrainSpec,
    world: World,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Per head {loss, top1, …, top5}, as `evaluate` has it, and the drift; both empty where nothing is held out.

    The drift is {kl, perplexity: {original, tuned}, perplexity_change, greedy_agreement, positions}: KL(original ‖
    tuned) in nats per position, perplexity of the text, the share of positions at which both would choose the same
    token. At most about `evaluate.MAX_POSITIONS` positions are looked at, always the same ones.
    """
    settings, device = spec.settings, heads.device
    dtype = product_dtype(spec, device)
    chosen = _sample(texts.get(evaluate.SPLIT, ()))
    groups = pack([text.num_read for text in chosen], settings.backbone.sequence_length)
    drift, scores = Drift.zero(device), Score.zero(settings.num_heads, evaluate.TOP, device)
    backbone.eval()
    share = groups[slice(*part(0, len(groups), world.rank, world.size))]
    padding = -(-len(groups) // world.size) - len(share)  # where layers are split, all workers run them
    for sequences in [*([[chosen[index] for index in group]] for group in share), *[[]] * padding]:
        batch = assemble_texts(sequences, settings.num_heads).to(device)
        with autocast():
            hidden_ND, original_ND = backbone.states(batch), backbone.original_states(batch)
            low_NR = backbone.low(hidden_ND)
            found = score(heads, hidden_ND, batch.next_N, batch.labels_KN, evaluate.TOP)
        moved = measure_drift(hidden_ND.to(dtype), low_NR, backbone.head, original_ND, batch.next_N)
        for total, more in zip((*drift, *scores), (*moved, *found), strict=True):
            total += more
    world.sum_all([*drift, *scores])
    return evaluate.per_head(scores), summarized(drift)


def summarized(drift: Drift) -> dict[str, Any]:
    """The drift's means; empty of no positions."""
    kl, original_loss, tuned_loss, agreed, positions = (float(total) for total in drift)
    if not positions:
        return {}
    return {
        "kl": kl / positions,
        "perplexity": {"original": _exp(original_loss / positions), "tuned": _exp(tuned_loss / positions)},
        "perplexity_change": _exp((tuned_loss - original_loss) / positions) - 1,
        "greedy_agreement": agreed / positions,
        "positions": int(positions),
    }


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _sample(texts: Sequence[Text]) -> list[Text]:
    """Texts until there are enough positions, from all over the data, always the same ones."""
    taken: list[Text] = []
    positions = 0
    for index in np.random.default_rng(0).permutation(len(texts)):
        if positions >= evaluate.MAX_POSITIONS:
            break
        taken.append(texts[index])
        positions += texts[index].num_learned
    return taken
