"""Training batches of generated conversations, packed into sequences, for Medusa-2.

Conversations in one sequence do not attend to each other: position ids restart from 0 in each
conversation, and transformers builds the block-diagonal mask from them. A conversation is cut
after its last learned position, and at `sequence_length`. Sequences are packed once, by
best-fit decreasing. Every epoch shuffles the same sequences, so all epochs have equally many steps,
and the sequences of any (epoch, step) are computed directly.

Letters: B sequences, T tokens of the longest, N learned positions of all of them, K heads.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.conversations.conversation import Role
from pipeline.conversations.spans import IGNORED, Span, feature_positions, head_labels
from pipeline.training.feature_batches import ALONE, split_range
from pipeline.training.task import Workers


@dataclass(frozen=True)
class Text:
    """A conversation to train on.

    Attributes:
        ids: All token ids.
        spans: The target-written spans in the learned roles.
        num_read: The number of tokens that the backbone reads, from the start.
    """

    ids: npt.NDArray[np.int32]
    spans: tuple[Span, ...]
    num_read: int

    @property
    def num_learned(self) -> int:
        """The number of positions that training learns from in this conversation."""
        return int(np.count_nonzero(feature_positions(self.spans) < self.num_read))


NOTHING = Text(np.zeros(1, np.int32), (), num_read=1)


def read_texts(
    shards: Sequence[Path],
    *,
    fingerprint: str,
    vocab_size: int,
    roles: Collection[Role],
    sequence_length: int,
) -> dict[str, list[Text]]:
    """Read the generated conversations for training, by split.

    Conversations are cut at `sequence_length`. Conversations that then have no position to learn
    from in these roles are left out.

    Raises:
        DamagedShard: A shard cannot be read.
        DataError: A shard belongs to another run, or a token is outside the target's vocabulary.
    """
    texts: dict[str, list[Text]] = {}
    for row in read_token_rows(shards, fingerprint, vocab_size):
        spans = tuple(span for span in row.spans if span.role in roles)
        if not spans or min(span.start for span in spans) > sequence_length:
            continue
        # The last token is only ever a label, so the backbone does not read it.
        num_read = min(sequence_length, max(span.end for span in spans) - 1)
        texts.setdefault(row.split, []).append(Text(row.input_ids, spans, num_read))
    return texts


def pack_texts(texts: Sequence[Text], sequence_length: int) -> list[list[int]]:
    """Pack conversations into training sequences of at most `sequence_length` tokens.

    A longer conversation has a sequence of its own. Return, for each sequence, the indices of its
    conversations in `texts`. Conversations are placed from the longest to the shortest, each in the
    sequence with the least free space that holds it.
    """
    groups: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens that still fit, group), sorted
    for index in sorted(range(len(texts)), key=lambda i: -texts[i].num_read):
        length = texts[index].num_read
        place = bisect.bisect_left(free, (length, 0))
        if place < len(free):
            space, group = free.pop(place)
        else:
            space = sequence_length
            group = len(groups)
            groups.append([])
        groups[group].append(index)
        bisect.insort(free, (space - length, group))
    return groups


class TextPlan:
    """The packed sequences of each training step, over all workers.

    Args:
        groups: The packed sequences, as `pack_texts` returns them.
        batch_sequences: The maximum number of sequences per step over all workers.
        seed: Seed of each epoch's shuffle.
    """

    def __init__(self, groups: Sequence[list[int]], batch_sequences: int, seed: int):
        self.groups = groups
        self.steps_per_epoch = -(-len(groups) // batch_sequences)
        self._seed = seed

    def sequences(
        self, epoch: int, step: int, workers: Workers = ALONE
    ) -> list[tuple[int, list[int]]]:
        """Return one worker's sequences of a training step, as (number, conversations) pairs.

        The number is the sequence's index in the step over all workers. The conversations are
        indices into the texts that were packed. `step` is the step within the epoch.
        """
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self.groups))
        start, stop = split_range(0, len(order), step, self.steps_per_epoch)
        first, last = split_range(start, stop, workers.rank, workers.world_size)
        return [(place - start, self.groups[order[place]]) for place in range(first, last)]

    def largest_share(self, step: int, world_size: int) -> int:
        """Return the largest number of sequences that any worker has in a training step."""
        first, last = split_range(0, len(self.groups), step, self.steps_per_epoch)
        return -(-(last - first) // world_size)


class TextBatch(NamedTuple):
    """Training batch of packed sequences, with labels at N learned positions; all int64.

    Attributes:
        ids_BT: Token ids.
        positions_BT: Position ids, from 0 in each conversation.
        learned_N: The learned positions, as indices into the flattened [B · T].
        next_N: The token after each learned position.
        labels_KN: Each head's labels; -100 without a label.
        teacher_KN: Which of the N positions has the state that predicts each label; -1 without a
            label, or if that position is cut off.
    """

    ids_BT: Tensor
    positions_BT: Tensor
    learned_N: Tensor
    next_N: Tensor
    labels_KN: Tensor
    teacher_KN: Tensor

    def to(self, device: torch.device) -> TextBatch:
        """Copy a training batch of packed sequences to a device."""
        return TextBatch(*(tensor.to(device, non_blocking=True) for tensor in self))


def assemble_texts(sequences: Sequence[Sequence[Text]], num_heads: int) -> TextBatch:
    """Assemble a training batch of packed sequences, padded to the longest.

    A padding token attends only to itself. Without sequences the batch is one token without a
    label.
    """
    sequences = sequences or [[NOTHING]]
    longest = max(sum(text.num_read for text in texts) for texts in sequences)
    ids_BT = np.zeros((len(sequences), longest), np.int64)
    positions_BT = np.zeros_like(ids_BT)
    learned = []
    following = []
    labels = []
    teacher_rows = []
    num_before = 0
    for row, texts in enumerate(sequences):
        start = 0
        for text in texts:
            stop = start + text.num_read
            ids_BT[row, start:stop] = text.ids[: text.num_read]
            positions_BT[row, start:stop] = np.arange(text.num_read)
            every_role = {span.role for span in text.spans}
            positions_N = feature_positions(text.spans).astype(np.int64)
            is_read_N = positions_N < text.num_read
            labels_KN = head_labels(text.ids, text.spans, num_heads, every_role)[:, is_read_N]
            positions_N = positions_N[is_read_N]
            # The target predicts head k's label, the token at t+2+k, at t+1+k: k+1 learned
            # positions later in the same span.
            number_N = np.arange(len(positions_N))
            teacher_KN = number_N + 1 + np.arange(num_heads)[:, None]
            has_teacher_KN = (labels_KN != IGNORED) & (teacher_KN < len(number_N))
            learned.append(row * longest + start + positions_N)
            following.append(text.ids[positions_N + 1])
            labels.append(labels_KN)
            teacher_rows.append(np.where(has_teacher_KN, teacher_KN + num_before, -1))
            start = stop
            num_before += len(number_N)
    arrays = (
        ids_BT,
        positions_BT,
        np.concatenate(learned),
        np.concatenate(following),
        np.concatenate(labels, 1),
        np.concatenate(teacher_rows, 1),
    )
    return TextBatch(*(torch.from_numpy(array.astype(np.int64)) for array in arrays))
