"""Figures on held-out conversations: how good heads are, and how far a tuned backbone is from the
original.

Letters: N positions, D hidden size, K heads, R ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.seen_answers import SeenAnswers, TrainingText
from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.conversations.conversation import Role
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutPlaces, HeldOutRanks
from pipeline.execution.progress import ProgressReporter
from pipeline.heads.accuracy import Score, label_ranks, score
from pipeline.heads.kind import Heads
from pipeline.training.adapted_backbone import Backbone
from pipeline.training.backbone_losses import Drift, measure_drift
from pipeline.training.epoch_plan import EpochPlan, part
from pipeline.training.feature_batches import load_batches
from pipeline.training.task import TrainSpec, Workers, product_dtype
from pipeline.training.text_batches import Text, assemble_texts, pack

SPLIT = "calibrate"
MAX_POSITIONS = 131_072  # an accuracy's standard error is then under 0.15 %
GROWN_POSITIONS = 16_384  # at which a dynamic tree is grown: as much work as drafting there
TOP = 5


def evaluate(
    heads: Heads, rows: FeatureRows, workers: Workers, *, batch_tokens: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Figures over the held-out rows, all workers together; see `figures_of`.

    Matrix products run in `dtype`. At most `MAX_POSITIONS` positions are looked at, always the same
    ones.
    """
    device = heads.device
    plan = EpochPlan(rows.lengths(SPLIT), batch_tokens=batch_tokens, seed=0, limit=MAX_POSITIONS)
    total = Score.zero(heads.shape, TOP, device)
    steps = range(plan.num_steps)
    for batch in load_batches(
        rows, plan, steps, rank=workers.rank, world_size=workers.world_size, device=device
    ):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            found = score(heads, batch.hidden_ND, batch.next_N, batch.labels_KN, TOP)
        for sums, more in zip(total, found, strict=True):
            sums += more
    workers.sum_all(total)
    return figures_of(total)


def figures_of(found: Score) -> dict[str, Any]:
    """`held_out`: per head {loss, top1, …, top5}; `frequency`: head 0's {top1, …, top5}, had it
    guessed by frequency.

    That is the share of the most frequent of its own labels, of the two most frequent, …: the most
    that guesses can reach that read nothing. Both are empty of no labels. Where some labels are
    outside the draft vocabulary, `draft_coverage` is the share of head 0's that are not.
    """
    num_ranks, num_labels, num_drafted = (
        found.hits_KR.shape[1],
        int(found.counts_K[0]),
        int(found.drafted_K[0]),
    )
    hits_R = (
        found.tokens_V.topk(min(num_ranks, len(found.tokens_V))).values.cumsum(0).tolist()
        if num_labels
        else []
    )
    frequency = {f"top{rank + 1}": hits / num_labels for rank, hits in enumerate(hits_R)}
    coverage = {"draft_coverage": num_drafted / num_labels} if num_drafted < num_labels else {}
    return {"held_out": per_head(found), "frequency": frequency, **coverage}


def per_head(found: Score) -> list[dict[str, float]]:
    """A score as {loss, top1, …} per head; empty of no labels. Losses are means over labels that
    can be proposed.
    """
    if not found.counts_K.any():
        return []
    hits_KR = found.hits_KR
    losses_K, shares_KR = (
        found.losses_K / found.drafted_K.clamp(min=1),
        hits_KR / found.counts_K.clamp(min=1)[:, None],
    )
    means_KR = torch.cat([losses_K[:, None], shares_KR], 1)
    names = ["loss", *(f"top{rank + 1}" for rank in range(hits_KR.shape[1]))]
    return [dict(zip(names, row, strict=True)) for row in means_KR.tolist()]


def held_out_ranks(
    shards: Sequence[str],
    fingerprint: str,
    heads: str,
    roles: Collection[Role],
    top: int,
    device: str,
    trained: TrainingText | None = None,
    progress: ProgressReporter | None = None,
) -> HeldOutRanks:
    """Where the tokens of held-out rows stand among trained heads' first `top` guesses.

    Args:
        shards, fingerprint, roles: As in `FeatureRows`.
        heads: Path of the trained heads.
        trained: The training rows' answers; None where they are not known, and none counts as seen.

    At most about `MAX_POSITIONS` positions are looked at, of rows from all over the data, in fp32
    on `device`.
    """

    def ranks(module: Heads, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor) -> Tensor:
        return label_ranks(module, hidden_ND, next_N, labels_KN, top)

    found = _held_out(
        shards, fingerprint, heads, roles, device, MAX_POSITIONS, ranks, trained, progress
    )
    return HeldOutRanks(*found)


def held_out_places(
    shards: Sequence[str],
    fingerprint: str,
    heads: str,
    roles: Collection[Role],
    tree: DynamicTree,
    device: str,
    trained: TrainingText | None = None,
    progress: ProgressReporter | None = None,
) -> HeldOutPlaces:
    """Where the tokens of held-out rows stand among the nodes that a dynamic tree proposes,
    whatever its size.

    As `held_out_ranks`, of at most about `GROWN_POSITIONS` positions.
    """
    found = _held_out(
        shards, fingerprint, heads, roles, device, GROWN_POSITIONS, tree.places, trained, progress
    )
    return HeldOutPlaces(*found)


def _held_out(
    shards: Sequence[str],
    fingerprint: str,
    heads: str,
    roles: Collection[Role],
    device: str,
    limit: int,
    measure: Callable[[Heads, Tensor, Tensor, Tensor], Tensor],
    trained: TrainingText | None,
    progress: ProgressReporter | None,
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """What is measured [K, N] of the heads at held-out positions; of each span its first one, its
    conversation, and whether it is seen.

    `measure` is given the heads, the states, the next tokens and the labels of one row.
    """
    module = read_trained_heads(Path(heads)).to(device)
    shape = module.shape
    rows = FeatureRows(
        shards,
        fingerprint=fingerprint,
        hidden_size=shape.hidden_size,
        vocab_size=shape.target_vocab_size,
        num_heads=shape.max_depth,
        roles=roles,
    )
    parts_KN: list[npt.NDArray[Any]] = []
    starts, conversations = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    seen: list[bool] = []
    seen_answers = SeenAnswers() if trained is None else trained.answers()
    num_positions = 0
    lengths = rows.lengths(SPLIT)
    places = [
        (group, int(row)) for group, found in enumerate(lengths) for row in np.flatnonzero(found)
    ]
    chosen = sorted(
        places[index]
        for index in _sample([int(lengths[group][row]) for group, row in places], limit)
    )
    progress = progress or ProgressReporter()
    progress.begin("held-out rows", len(chosen), unit="conversations")
    for group, in_group in groupby(chosen, key=itemgetter(0)):
        opened = rows.read_group(group)
        for _, number in in_group:
            row = opened[number]
            labels_KN = torch.from_numpy(row.labels_KN).to(device, torch.int64)
            hidden_ND = row.hidden_ND[row.learnable].to(device, torch.float32)
            next_N = torch.from_numpy(row.next_N).to(device, torch.int64)
            parts_KN.append(measure(module, hidden_ND, next_N, labels_KN).cpu().numpy())
            answers = row.answers()
            num_learnable = [len(answer) - 1 for answer in answers]
            starts.append(num_positions + np.cumsum([0, *num_learnable])[:-1])
            conversations.append(np.full(len(answers), len(conversations)))
            seen += [answer in seen_answers for answer in answers]
            num_positions += len(row.learnable)
            progress.advance(tokens=len(row.learnable))
    found_KN = np.concatenate(parts_KN or [np.empty((shape.max_depth, 0), np.uint8)], axis=1)
    return found_KN, np.concatenate(starts), np.concatenate(conversations), np.array(seen, np.bool_)


def _sample(sizes: Sequence[int], limit: int) -> list[int]:
    """Indices into `sizes` until `limit` positions are reached, from all over the data, always the
    same ones.
    """
    order = np.random.default_rng(0).permutation(len(sizes))
    totals = np.cumsum(np.array(sizes, np.int64)[order])
    return order[: np.searchsorted(totals, limit) + 1].tolist()


@torch.no_grad()
def evaluate_tuned(
    backbone: Backbone,
    heads: Heads,
    texts: Sequence[Text],
    spec: TrainSpec,
    workers: Workers,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The heads' figures, as of `evaluate`, and the drift; empty where nothing is held out.

    The drift is {kl, perplexity: {original, tuned}, perplexity_change, greedy_agreement,
    positions}: KL(original ‖ tuned) in nats per position, perplexity of the text, the share of
    positions at which both would choose the same token. At most about `MAX_POSITIONS` positions are
    looked at, always the same ones.
    """
    settings, device = spec.settings, heads.device
    dtype = product_dtype(spec, device)
    chosen = [
        texts[index] for index in _sample([text.num_learned for text in texts], MAX_POSITIONS)
    ]
    groups = pack([text.num_read for text in chosen], settings.backbone.sequence_length)
    drift, scores = Drift.zero(device), Score.zero(heads.shape, TOP, device)
    backbone.eval()
    share = groups[slice(*part(0, len(groups), workers.rank, workers.world_size))]
    padding = -(-len(groups) // workers.world_size) - len(
        share
    )  # where layers are split, all workers run them
    for sequences in [*([[chosen[index] for index in group]] for group in share), *[[]] * padding]:
        batch = assemble_texts(sequences, settings.num_heads).to(device)
        with autocast():
            hidden_ND, original_ND = backbone.states(batch), backbone.original_states(batch)
            low_NR = backbone.low(hidden_ND)
            found = score(heads, hidden_ND, batch.next_N, batch.labels_KN, TOP)
        moved = measure_drift(hidden_ND.to(dtype), low_NR, backbone.head, original_ND, batch.next_N)
        for total, more in zip((*drift, *scores), (*moved, *found), strict=True):
            total += more
    workers.sum_all([*drift, *scores])
    return figures_of(scores), summarized(drift)


def summarized(drift: Drift) -> dict[str, Any]:
    """The drift's means; empty of no positions."""
    kl, original_loss, tuned_loss, agreed, positions = (float(total) for total in drift)
    if not positions:
        return {}
    return {
        "kl": kl / positions,
        "perplexity": {
            "original": _exp(original_loss / positions),
            "tuned": _exp(tuned_loss / positions),
        },
        "perplexity_change": _exp((tuned_loss - original_loss) / positions) - 1,
        "greedy_agreement": agreed / positions,
        "positions": int(positions),
    }


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
