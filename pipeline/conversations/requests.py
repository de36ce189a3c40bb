"""Requests to generation engines, their completions, text streaming and loop detection."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Finish = Literal["stop", "length"]

MIN_REPEATS = 4
MIN_LOOP_TOKENS = 32  # shorter repetition is ordinary text: a line of dashes, a list, a refrain
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the decoded text of an incomplete character


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a request; temperature 0 is greedy, top_p 1 is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """A request to a generation engine for one text.

    `id` is unique among the unfinished requests of an engine. Without a `seed`, sampling is not
    reproducible.
    """

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    seed: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The sampled token ids of a request, including the stop token if one ended the text.

    `finished` is "stop" after a stop token, else "length".
    """

    id: str
    token_ids: list[int]
    finished: Finish


@dataclass
class TextCounts:
    """Counts of the texts that an engine writes, with an estimate of the tokens left.

    Attributes:
        left: The texts that are not finished, at most, running ones included.
        longest: The tokens of a text, at most.
        ended: The finished texts.
        ended_tokens: The tokens of finished texts.
        running_tokens: The tokens of texts that are still written.
    """

    left: int = 0
    longest: int = 0
    ended: int = 0
    ended_tokens: int = 0
    running_tokens: int = 0

    def end_text(self, num_tokens: int) -> None:
        """Count a finished text."""
        self.ended += 1
        self.ended_tokens += num_tokens

    @property
    def tokens(self) -> int:
        """The tokens so far."""
        return self.ended_tokens + self.running_tokens

    @property
    def tokens_left(self) -> int:
        """The expected number of tokens left.

        It is the most possible until a text ends. Then a text has tokens / ended tokens on average:
        the estimate for texts that end at random, in which running texts are not taken for short.
        """
        most = self.left * self.longest - self.running_tokens
        if self.ended:
            most = min(most, self.left * self.tokens // self.ended)
        return max(0, most)


def sample_seed(run_seed: int, row_id: str, turn: int) -> int:
    """Return the 63-bit sampling seed of a request: a hash of the run's seed, row id and turn.

    `turn` is the 0-based index of the request in its conversation.
    """
    digest = hashlib.sha256(f"{run_seed}:{turn}:{row_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class TextStream:
    """Streaming decoder of sampled tokens; special tokens have no text.

    A character can take several tokens, and a token's text can depend on the preceding tokens (a
    leading space). Each token is therefore decoded together with the preceding ones, and held back
    while its text ends in an incomplete character.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        self._shown: list[int] = []  # the last ids whose text was returned
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Add the next token, and return the text that is now complete; it may be empty."""
        self._held.append(token_id)
        text = self.flush()
        if not text or text.endswith(UNFINISHED):
            return ""
        self._shown = self._held
        self._held = []
        return text

    def flush(self) -> str:
        """Return the text of the held-back tokens, even if it ends in an incomplete character.

        The tokens stay held back.
        """
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]

    def _decode(self, ids: list[int]) -> str:
        """Decode token ids into text without special tokens."""
        return self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


def degenerate_loop(ids: Sequence[int]) -> bool:
    """Return whether a text's token ids end in a loop.

    A loop is an n-gram that occurs at least 4 times in a row, over at least 32 tokens.
    """
    tail = np.asarray(ids)
    if len(tail) < MIN_LOOP_TOKENS:
        return False
    for period in range(1, len(tail) // MIN_REPEATS + 1):
        end = tail[-max(MIN_LOOP_TOKENS, MIN_REPEATS * period) :]
        if np.array_equal(end[period:], end[:-period]):
            return True
    return False
