"""Seen answers: held-out answers that the target has also written in a training row.

Heads have been trained on such an answer, so rates on it overestimate rates on new text. An answer
is *seen* if its first 32 tokens, or all tokens of a shorter answer, equal those of an answer in the
split `train`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.json_form import result
from pipeline.storage.stage_directory import StageDirectory

PREFIX = 32  # tokens
ENOUGH_NEW = 8  # answers; rates on fewer are too uncertain


@result
class NewAnswers:
    """The number of answers that are not seen, and rates on these.

    Rates are None if they were not measured, or if there are fewer than `ENOUGH_NEW` such answers.
    """

    answers: int
    acceleration_rate: float | None = None
    standard_error: float | None = None
    expected_acceleration_rate: float | None = None
    expected_standard_error: float | None = None


Tokens = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True)
class TrainingText:
    """The generate shards with the training rows, and their fingerprint; picklable."""

    shards: tuple[Path, ...]
    fingerprint: str

    def answers(self) -> SeenAnswers:
        """Read the answers in training rows; each takes about 100 bytes of memory."""
        seen = SeenAnswers()
        for text in self.texts():
            seen.add(text)
        return seen

    def texts(self) -> Iterator[npt.NDArray[np.int32]]:
        """Yield the token ids of each target-written span in a training row."""
        for row in read_token_rows(self.shards, self.fingerprint):
            if row.split == "train":
                for span in row.spans:
                    yield row.input_ids[span.start : span.end]


def training_text(generated: StageDirectory) -> TrainingText:
    """Return the shards of a generate stage's directory, with their fingerprint."""
    return TrainingText(tuple(generated.shards()), generated.fingerprint)


class SeenAnswers:
    """The set of answers in training rows, compared by their first 32 tokens."""

    def __init__(self) -> None:
        self._beginnings: set[bytes] = set()

    def add(self, answer: Tokens) -> None:
        """Add the token ids of an answer in a training row."""
        self._beginnings.add(_answer_digest(answer))

    def __contains__(self, answer: Tokens) -> bool:
        return _answer_digest(answer) in self._beginnings


def _answer_digest(answer: Tokens) -> bytes:
    """Return a digest of the first 32 token ids of an answer."""
    data = np.asarray(answer[:PREFIX], np.int32).tobytes()
    return hashlib.blake2b(data, digest_size=8).digest()
