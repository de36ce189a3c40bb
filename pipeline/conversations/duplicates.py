"""Filters of duplicate seeds and samples, and of seeds with check questions."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from pipeline.conversations.conversation import (
    Conversation,
    Message,
    Mode,
    Reason,
    RejectedRow,
    RowRejected,
)
from pipeline.conversations.row_builder import GeneratedRow

Words = tuple[str, ...]
TokenIds = tuple[str, tuple[tuple[int, ...], ...]]  # a seed's id, and the token ids of its rows

ANCHOR_WORDS = 5  # number of a question's first words by which it is found
FEWEST_WORDS = 8  # a shorter question must be a whole message
WORDS = re.compile(
    r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+"
)


@dataclass
class Deduplicator:
    """Filter of duplicate conversations across seed sources.

    Two conversations are duplicates if generation reads the same messages of both, and both offer
    the same functions.

    Args:
        mode, rounds: The messages that generation reads, see `Conversation.read_by`.
    """

    mode: Mode
    rounds: int | None = None

    def __post_init__(self) -> None:
        self._first_seen: dict[bytes, str] = {}

    def check(self, conversation: Conversation) -> Conversation | RejectedRow:
        """Return the conversation, or a `RejectedRow` if it duplicates an earlier one.

        A conversation that is returned is remembered for the comparison with later ones.
        """
        texts = []
        for message in conversation.read_by(self.mode, self.rounds):
            texts.append((message.role, message.content, message.tool_calls))
        digest = hashlib.sha256(json.dumps([texts, conversation.tools]).encode()).digest()
        first = self._first_seen.setdefault(digest, conversation.id)
        if first != conversation.id:
            return _rejected_seed(conversation, Reason.DUPLICATE, f"Same messages as {first}.")
        return conversation


class CheckQuestions:
    """Filter of conversations that contain a question of the check stage (decontamination).

    A question of eight words or more is also found within a message; a shorter question is found
    only as a whole message. Case, punctuation and white space are ignored.
    """

    def __init__(self, questions: Iterable[Conversation]):
        self._by_anchor: defaultdict[Words, list[tuple[Words, str]]] = defaultdict(list)
        for question in questions:
            for message in question.messages:
                words = words_of(message.content)
                if message.role == "user" and words:
                    self._by_anchor[words[:ANCHOR_WORDS]].append((words, question.id))

    def check(self, conversation: Conversation) -> Conversation | RejectedRow:
        """Return the conversation, or a `RejectedRow` if a message of it contains a question."""
        for message in conversation.messages:
            found = self.find_question(message)
            if found is not None:
                detail = f"It contains the check's question {found}."
                return _rejected_seed(conversation, Reason.CONTAMINATED, detail)
        return conversation

    def find_question(self, message: Message) -> str | None:
        """Return the id of the first check question that a message contains, or None."""
        words = words_of(message.content)
        for start in range(len(words)):
            for question, id in self._by_anchor.get(words[start : start + ANCHOR_WORDS], ()):
                enough = question == words or len(question) >= FEWEST_WORDS
                if enough and words[start : start + len(question)] == question:
                    return id
        return None


def require_new_sample(rows: Sequence[GeneratedRow], earlier: dict[TokenIds, str]) -> None:
    """Raise RowRejected if an earlier sample of the same seed has the same token ids.

    If none has, add this sample to `earlier`.

    Args:
        rows: The rows of one sample.
        earlier: The row id of each sample so far, by its token ids.
    """
    text = tuple(tuple(row.input_ids) for row in rows)
    first = earlier.setdefault((rows[0].parent_id, text), rows[0].id)
    if first != rows[0].id:
        raise RowRejected(Reason.DUPLICATE, f"Same tokens as the sample {first}.")


def _rejected_seed(conversation: Conversation, reason: Reason, detail: str) -> RejectedRow:
    """Return the quarantine record of a rejected conversation."""
    return RejectedRow(conversation.id, reason, detail, asdict(conversation))


def normalize_text(text: str) -> str:
    """Normalize a text to its lower-case words, separated by single spaces.

    A text without letters and digits is returned unchanged.
    """
    return " ".join(words_of(text)) or text


def words_of(text: str) -> Words:
    """Split a text into lower-case words; each Chinese, Japanese or Korean character is a word."""
    return tuple(WORDS.findall(unicodedata.normalize("NFKC", text).casefold()))
