"""The generated conversations, packed into sequences of one length, none of which sees another
(Medusa-2).

A conversation is cut after the last state that learns something; what reaches beyond
`sequence_length` is left out and counted. Sequences are packed once, as densely as the
longest-first rule can, and every epoch goes through them in an order of its own, so that all epochs
have equally many steps and any (epoch, step) is reached by arithmetic.

Positions start from 0 in each conversation: transformers reads from that where one ends, and masks
the others.

Letters: B sequences, T tokens of the longest, N learned positions of all of them, K heads.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.conversations.conversation import Role
from pipeline.conversations.spans import IGNORED, Span, feature_positions, head_labels
from pipeline.training.epoch_plan import part


@dataclass(frozen=True)
class Text:
    """A conversation: its tokens, what the target wrote in the roles that are learned, and how much
    of it is read.
    """

    ids: npt.NDArray[np.int32]
    spans: tuple[Span, ...]
    num_read: int

    @property
    def num_learned(self) -> int:
        """Target-written tokens that are learned."""
        return int(np.count_nonzero(feature_positions(self.spans) < self.num_read))

    @property
    def num_cut(self) -> int:
        """Those that are not, since they lie beyond what is read."""
        return sum(map(len, self.spans)) - self.num_learned


NOTHING = Text(np.zeros(1, np.int32), (), num_read=1)


def read_texts(
    shards: Sequence[str],
    *,
    fingerprint: str,
    vocab_size: int,
    roles: Collection[Role],
    sequence_length: int,
) -> dict[str, list[Text]]:
    """Every split's conversations with something to learn, in order, in memory: four bytes a token.

    Where nothing of it is within `sequence_length`, nothing of the conversation is read.

    Raises:
        DamagedShard: A shard cannot be read.
        DataError: A shard is of another run, or a token is none of the target's.
    """
    texts: dict[str, list[Text]] = {}
    for row in read_token_rows(shards, fingerprint, vocab_size):
        if spans := tuple(span for span in row.spans if span.role in roles):
            reached = any(span.start <= sequence_length for span in spans)
            # The last token of all is a label, and never read.
            num_read = min(sequence_length, max(span.end for span in spans) - 1) if reached else 0
            texts.setdefault(row.split, []).append(Text(row.input_ids, spans, num_read))
    return texts


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices into `lengths`, in groups of at most `capacity` together: longest first, each where
    it fits tightest.

    A length of 0 leaves its index out.
    """
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens that still fit, group), sorted
    for index in sorted(
        filter(lengths.__getitem__, range(len(lengths))), key=lambda i: (-lengths[i], i)
    ):
        place = bisect.bisect_left(free, (lengths[index], 0))
        if place < len(free):
            space, group = free.pop(place)
        else:
            space, group = capacity, len(groups)
            groups.append([])
        groups[group].append(index)
        bisect.insort(free, (space - lengths[index], group))
    return groups


class TextPlan:
    """Which sequences each step reads: `batch_sequences` of them, give or take one, over all
    workers.
    """

    def __init__(
        self, texts: Sequence[Text], *, sequence_length: int, batch_sequences: int, seed: int
    ):
        self.groups = pack([text.num_read for text in texts], sequence_length)
        self.steps_per_epoch = -(-len(self.groups) // batch_sequences)
        self._seed = seed

    def sequences(
        self, epoch: int, step: int, rank: int = 0, world_size: int = 1
    ) -> list[tuple[int, list[int]]]:
        """One worker's share of a step: each sequence's number within the step, and its texts; it
        may be empty.
        """
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self.groups))
        chosen = order[slice(*part(0, len(order), step, self.steps_per_epoch))]
        first, last = part(0, len(chosen), rank, world_size)
        return [(number, self.groups[chosen[number]]) for number in range(first, last)]

    def largest_share(self, step: int, world_size: int) -> int:
        """How many of a step's sequences the worker with the most has."""
        first, last = part(0, len(self.groups), step, self.steps_per_epoch)
        return -(-(last - first) // world_size)


@dataclass(frozen=True)
class TextBatch:
    """Packed sequences; the labels are at `learned_N`, positions in the flattened [B·T]."""

    ids_BT: Tensor
    positions_BT: Tensor
    learned_N: Tensor
    next_N: Tensor  # the tokens that follow
    labels_KN: Tensor  # the heads', -100 where one has nothing to learn
    # which of the states at `learned_N` predicts each label; -1 where none does, or it is cut off
    teacher_KN: Tensor

    def to(self, device: torch.device) -> TextBatch:
        moved = (getattr(self, field.name) for field in fields(self))
        return TextBatch(*(tensor.to(device, non_blocking=True) for tensor in moved))


def assemble_texts(sequences: Sequence[Sequence[Text]], num_heads: int) -> TextBatch:
    """One batch of sequences; behind a shorter one every token of padding is a conversation of its
    own.

    Of no sequences it is one token that nobody learns from.
    """
    sequences = sequences or [[NOTHING]]
    longest = max(sum(text.num_read for text in texts) for texts in sequences)
    ids_BT = np.zeros((len(sequences), longest), np.int64)
    positions_BT = np.zeros_like(ids_BT)
    learned, following, labels, teachers = [], [], [], []
    num_before = 0
    for row, texts in enumerate(sequences):
        start = 0
        for text in texts:
            stop = start + text.num_read
            ids_BT[row, start:stop] = text.ids[: text.num_read]
            positions_BT[row, start:stop] = np.arange(text.num_read)
            positions_N = feature_positions(text.spans)
            read_N = positions_N < text.num_read
            every_role = {span.role for span in text.spans}
            learned.append(row * longest + start + positions_N[read_N].astype(np.int64))
            following.append(text.ids[positions_N[read_N] + 1])
            labels.append(head_labels(text.ids, text.spans, num_heads, every_role)[:, read_N])
            # Head k's label, the token at t+2+k, is predicted at t+1+k: k+1 states on, within the
            # same span.
            number_N = np.arange(text.num_learned)
            rows_KN = number_N + 1 + np.arange(num_heads)[:, None]
            taught_KN = (labels[-1] != IGNORED) & (rows_KN < len(number_N))
            teachers.append(np.where(taught_KN, rows_KN + num_before, -1))
            start, num_before = stop, num_before + len(number_N)
    flat = (
        np.concatenate(learned),
        np.concatenate(following),
        np.concatenate(labels, 1),
        np.concatenate(teachers, 1),
    )
    return TextBatch(
        *(torch.from_numpy(array.astype(np.int64)) for array in (ids_BT, positions_BT, *flat))
    )
