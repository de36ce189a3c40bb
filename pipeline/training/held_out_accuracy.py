"""The heads' accuracy on held-out text, and the ranks of held-out tokens for the tree search.

Letters: N positions, D hidden size, K heads, R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.check_result import TunedDrift
from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.row_states import RowStates
from pipeline.artifacts.seen_answers import SeenAnswers, TrainingText
from pipeline.artifacts.trained_heads import read_trained_heads
from pipeline.conversations.conversation import Role
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.heads.accuracy import Score, label_ranks
from pipeline.heads.kind import Heads
from pipeline.heads.rows import Rows

SPLIT = "calibrate"
# An accuracy's standard error would be under 0.15 % if tokens were independent. Those of one
# conversation are not, so it is larger.
MAX_POSITIONS = 131_072
GROWN_POSITIONS = 16_384  # for dynamic trees, where each position takes as long as drafting a tree
TOP = 5


@dataclass(frozen=True)
class Evaluation:
    """Losses and accuracies of the heads on held-out text; empty if nothing is held out.

    Attributes:
        held_out: For each head {loss, top1, …, top5}. Losses are means over the labels in the draft
            vocabulary, accuracies over all labels.
        frequency: {top1, …, top5} of a head 0 that always guesses the most frequent labels: the
            highest accuracy of guesses that ignore the text.
        draft_coverage: The share of head 0's labels in the draft vocabulary; None if all are.
        drift: The distance of a tuned backbone from the original; None if only heads are trained.
    """

    held_out: list[dict[str, float]]
    frequency: dict[str, float]
    draft_coverage: float | None = None
    drift: TunedDrift | None = None

    def loss(self, decay: float) -> float | None:
        """Return the heads' held-out loss for early stopping, a sum weighted by decay^(k+1).

        It is None if nothing is held out.
        """
        if not self.held_out:
            return None
        return sum(decay ** (k + 1) * head["loss"] for k, head in enumerate(self.held_out))


def summarize_scores(score: Score, drift: TunedDrift | None = None) -> Evaluation:
    """Return the mean losses and accuracies of a held-out evaluation, given its summed scores.

    Without labels they are empty.
    """
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
    """Held-out feature shards, and the trained heads that are evaluated on them.

    Attributes:
        shards, fingerprint, roles: As in `FeatureRows`.
        row_shards, row_fingerprint: As in `RowStates`, for heads with `row_layers`.
        heads: Path of the trained heads.
        trained: The training rows' answers; if None, no answer counts as seen in training.
    """

    shards: tuple[Path, ...]
    fingerprint: str
    heads: Path
    roles: tuple[Role, ...]
    trained: TrainingText | None = None
    row_shards: tuple[Path, ...] = ()
    row_fingerprint: str = ""


def held_out_ranks(
    text: HeldOutText, top: int, gpus: int = 0, progress: ProgressReporter = SILENT
) -> HeldOutRanks:
    """Rank held-out tokens among the trained heads' `top` guesses each, for static trees.

    The ranks are computed in fp32 for about `MAX_POSITIONS` positions of random rows, on a GPU if
    `gpus` is not 0.
    """

    def measure(
        heads: Heads, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor, rows: Rows | None
    ) -> Tensor:
        """Rank each label among the heads' guesses."""
        return label_ranks(heads, hidden_ND, next_N, labels_KN, top, rows)

    return _rank_held_out_rows(text, measure, MAX_POSITIONS, gpus, progress)


def held_out_places(
    text: HeldOutText, tree: DynamicTree, gpus: int = 0, progress: ProgressReporter = SILENT
) -> HeldOutRanks:
    """Rank held-out tokens among the nodes that the trained heads propose for a dynamic tree.

    The ranks are computed in fp32 for about `GROWN_POSITIONS` positions of random rows, on a GPU if
    `gpus` is not 0.
    """

    def measure(
        heads: Heads, hidden_ND: Tensor, next_N: Tensor, labels_KN: Tensor, rows: Rows | None
    ) -> Tensor:
        """Rank each label among the tree's nodes."""
        assert rows is None, "refused before the run"
        return tree.places(heads, hidden_ND, next_N, labels_KN)

    return _rank_held_out_rows(text, measure, GROWN_POSITIONS, gpus, progress)


def _rank_held_out_rows(
    text: HeldOutText,
    measure: Callable[[Heads, Tensor, Tensor, Tensor, Rows | None], Tensor],
    limit: int,
    gpus: int,
    progress: ProgressReporter,
) -> HeldOutRanks:
    """Read the trained heads, and rank the tokens of random held-out rows with `measure`.

    Args:
        text: The held-out shards and the heads.
        measure: Returns the rank of each label [K, N], given the heads, and the hidden states, next
            tokens, labels and, for heads with `row_layers`, the whole of one row.
        limit: The approximate number of positions to rank.
        gpus: 0 computes on the CPU, any other number on the default GPU.
        progress: Counts the rows.
    """
    device = torch.device("cuda" if gpus else "cpu")
    heads = read_trained_heads(text.heads).to(device)
    layers = heads.shape.row_layers
    row_states = None
    if layers:
        row_states = RowStates(text.row_shards, fingerprint=text.row_fingerprint, layers=layers)
    rows = FeatureRows(
        text.shards,
        fingerprint=text.fingerprint,
        num_heads=heads.shape.max_depth,
        roles=text.roles,
        row_states=row_states,
    )
    chosen = _choose_held_out_rows(rows.lengths(SPLIT), limit)
    progress.begin("held-out rows", len(chosen), unit="rows")
    ranks = []
    answers = []
    conversations = []  # the number of each answer's conversation
    numbers: dict[str, int] = {}
    open_group = None
    for group, index in chosen:
        if group != open_group:
            opened = rows.read_group(group)
            open_group = group
        row = opened[index]
        hidden_ND = row.hidden_ND[row.learnable].to(device, torch.float32)
        next_N = torch.from_numpy(row.next_N).to(device, torch.int64)
        labels_KN = torch.from_numpy(row.labels_KN).to(device, torch.int64)
        whole_row = row.whole_row().to(device) if layers else None
        ranks.append(measure(heads, hidden_ND, next_N, labels_KN, whole_row))
        of_row = row.answers()
        answers += of_row
        number = numbers.setdefault(row.parent_id, len(numbers))
        conversations += [number] * len(of_row)
        progress.advance(tokens=len(row.learnable))
    seen_answers = text.trained.answers() if text.trained else SeenAnswers()
    seen = [answer in seen_answers for answer in answers]
    # An answer's first token has no rank: head 0 predicts the second.
    lengths = np.array([len(answer) - 1 for answer in answers], np.int64)
    starts = lengths.cumsum() - lengths  # of each answer among the ranked positions
    ranks_KN = np.empty((heads.shape.max_depth, 0), np.uint8)
    if ranks:
        ranks_KN = torch.cat(ranks, 1).cpu().numpy()
    return HeldOutRanks(
        ranks_KN, starts, np.array(conversations, np.int64), np.array(seen, np.bool_)
    )


def _choose_held_out_rows(
    lengths_of_groups: Sequence[npt.NDArray[np.int64]], limit: int
) -> list[tuple[int, int]]:
    """Choose random rows with about `limit` positions in total, as sorted (row group, row) pairs.

    Rows without positions are left out. The lengths are each row's positions, by row group.
    """
    places = []
    sizes = []
    for group, lengths in enumerate(lengths_of_groups):
        for index in np.flatnonzero(lengths).tolist():
            places.append((group, index))
            sizes.append(int(lengths[index]))
    return sorted(places[i] for i in sample_rows(sizes, limit))


def sample_rows(sizes: Sequence[int], limit: int) -> list[int]:
    """Choose random rows with about `limit` positions in total; return their indices in `sizes`.

    `sizes` are the rows' numbers of positions. Rows are added until they have `limit` positions.
    The same arguments give the same rows.
    """
    order = np.random.default_rng(0).permutation(len(sizes))
    totals = np.cumsum(np.array(sizes, np.int64)[order])
    return order[: np.searchsorted(totals, limit) + 1].tolist()
