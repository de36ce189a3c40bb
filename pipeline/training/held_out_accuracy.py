"""The heads' accuracy on held-out text, and the guess ranks for calibrate's tree search.

Letters: N positions, D hidden size, K heads, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.check_result import TunedDrift
from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.seen_answers import SeenAnswers, TrainingText
from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.conversations.conversation import Role
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.execution.progress import ProgressReporter
from pipeline.heads.accuracy import Score, label_ranks

SPLIT = "calibrate"
MAX_POSITIONS = 131_072  # an accuracy's standard error is then under 0.15 %
GROWN_POSITIONS = 16_384  # for dynamic trees, where each position costs as much as drafting
TOP = 5


@dataclass(frozen=True)
class Evaluation:
    """Losses and accuracy of the heads on held-out text; empty if nothing is held out.

    Attributes:
        held_out: Per head {loss, top1, …, top5}. Losses are means over labels in the draft
            vocabulary.
        frequency: {top1, …, top5} of a head 0 that always guesses the most frequent labels: the
            upper bound for guesses that ignore the text.
        draft_coverage: The share of head 0's labels in the draft vocabulary; None if all are.
        drift: The distance of a tuned backbone from the original.
    """

    held_out: list[dict[str, float]]
    frequency: dict[str, float]
    draft_coverage: float | None = None
    drift: TunedDrift | None = None

    def loss(self, decay: float) -> float | None:
        """Return the sum of the heads' held-out losses, weighted by decay^(k+1), or None."""
        if not self.held_out:
            return None
        return sum(decay ** (k + 1) * head["loss"] for k, head in enumerate(self.held_out))


def summarize_scores(score: Score, drift: TunedDrift | None = None) -> Evaluation:
    """Convert summed scores on held-out text into the heads' mean losses and accuracies."""
    num_labels = int(score.counts_K[0])
    if num_labels == 0:
        return Evaluation([], {}, drift=drift)
    losses_K = score.losses_K / score.drafted_K.clamp(min=1)
    shares_KR = score.hits_KR / score.counts_K.clamp(min=1)[:, None]
    names = [f"top{rank + 1}" for rank in range(shares_KR.shape[1])]
    held_out = []
    for loss, shares_R in zip(losses_K.tolist(), shares_KR.tolist(), strict=True):
        held_out.append({"loss": loss, **dict(zip(names, shares_R, strict=True))})
    most_frequent_R = score.tokens_V.topk(len(names)).values
    frequent_R = (most_frequent_R.cumsum(0).double() / num_labels).tolist()
    frequency = dict(zip(names, frequent_R, strict=True))
    coverage = float(score.drafted_K[0]) / num_labels
    return Evaluation(held_out, frequency, coverage if coverage < 1 else None, drift)


@dataclass(frozen=True)
class HeldOutText:
    """Held-out feature shards, and the trained heads to evaluate on them.

    Attributes:
        shards, fingerprint, roles: As in `FeatureRows`.
        heads: Path of the trained heads.
        trained: The training rows' answers; if None, no answer counts as seen in training.
    """

    shards: tuple[str, ...]
    fingerprint: str
    heads: str
    roles: tuple[Role, ...]
    trained: TrainingText | None = None


def held_out_ranks(
    text: HeldOutText, top: int, gpus: int = 0, progress: ProgressReporter | None = None
) -> HeldOutRanks:
    """Rank each held-out token among the heads' first `top` guesses.

    The ranks are computed in fp32 for about `MAX_POSITIONS` positions of random rows, on a GPU if
    `gpus` is not 0.
    """
    rows = _HeldOutRows(text, gpus)
    for hidden_ND, next_N, labels_KN in rows.read(MAX_POSITIONS, progress):
        rows.measured.append(label_ranks(rows.heads, hidden_ND, next_N, labels_KN, top))
    return HeldOutRanks(rows.joined(), *rows.spans())


def held_out_places(
    text: HeldOutText, tree: DynamicTree, gpus: int = 0, progress: ProgressReporter | None = None
) -> HeldOutRanks:
    """Rank each held-out token's node among the proposed nodes of a dynamic tree.

    The places are computed in fp32 for about `GROWN_POSITIONS` positions, on a GPU if `gpus` is not
    0.
    """
    rows = _HeldOutRows(text, gpus)
    for hidden_ND, next_N, labels_KN in rows.read(GROWN_POSITIONS, progress):
        rows.measured.append(tree.places(rows.heads, hidden_ND, next_N, labels_KN))
    return HeldOutRanks(rows.joined(), *rows.spans())


class _HeldOutRows:
    """Held-out rows, and the ranks or places measured at each of their positions."""

    def __init__(self, text: HeldOutText, gpus: int):
        self.text = text
        self.device = "cuda" if gpus else "cpu"
        self.heads = read_trained_heads(Path(text.heads)).to(self.device)
        self.measured: list[Tensor] = []  # [K, N] of each row
        self.answers: list[npt.NDArray[np.int32]] = []
        self.conversations: list[int] = []  # of each answer

    def read(
        self, limit: int, progress: ProgressReporter | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield states, next tokens and labels of held-out rows with about `limit` positions."""
        shape = self.heads.shape
        rows = FeatureRows(
            self.text.shards,
            fingerprint=self.text.fingerprint,
            num_heads=shape.max_depth,
            roles=self.text.roles,
        )
        lengths = rows.lengths(SPLIT)
        places = []
        for group, of_group in enumerate(lengths):
            places += [(group, int(index)) for index in np.flatnonzero(of_group)]
        chosen = sample_rows([int(lengths[group][index]) for group, index in places], limit)
        progress = progress or ProgressReporter()
        progress.begin("held-out rows", len(chosen), unit="conversations")
        open_group = None
        for number, (group, index) in enumerate(sorted(places[i] for i in chosen), 1):
            if group != open_group:
                opened = rows.read_group(group)
                open_group = group
            row = opened[index]
            answers = row.answers()
            self.answers += answers
            self.conversations += [number] * len(answers)
            labels_KN = torch.from_numpy(row.labels_KN).to(self.device, torch.int64)
            hidden_ND = row.hidden_ND[row.learnable].to(self.device, torch.float32)
            next_N = torch.from_numpy(row.next_N).to(self.device, torch.int64)
            yield hidden_ND, next_N, labels_KN
            progress.advance(tokens=len(row.learnable))

    def joined(self) -> npt.NDArray[Any]:
        """Return the measurements of all held-out rows as one array [K, N]."""
        if not self.measured:
            return np.empty((self.heads.shape.max_depth, 0), np.uint8)
        return torch.cat([each.cpu() for each in self.measured], 1).numpy()

    def spans(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return each answer's first position, its conversation, and whether training saw it."""
        seen_answers = self.text.trained.answers() if self.text.trained else SeenAnswers()
        seen = [answer in seen_answers for answer in self.answers]
        lengths = np.array([len(answer) - 1 for answer in self.answers], np.int64)
        conversations = np.array(self.conversations, np.int64)
        return lengths.cumsum() - lengths, conversations, np.array(seen, np.bool_)


def sample_rows(sizes: Sequence[int], limit: int) -> list[int]:
    """Choose random held-out rows with about `limit` positions in total; deterministic."""
    order = np.random.default_rng(0).permutation(len(sizes))
    totals = np.cumsum(np.array(sizes, np.int64)[order])
    return order[: np.searchsorted(totals, limit) + 1].tolist()
