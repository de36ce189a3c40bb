"""A conversation, and what becomes of a row that cannot be one.

Every row of every stage ends in exactly one of two ways: kept, or quarantined with one of the reasons below. Code
that looks at one row raises `RowRejected`; whoever owns the row turns that into a `RejectedRow` record.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant"]

UNDECODABLE_MARK = "\ufdd0"  # stands for bytes that were not UTF-8: a code point that Unicode keeps for internal use


@dataclass(frozen=True)
class Message:
    """One turn's text."""

    role: Role
    content: str


@dataclass(frozen=True)
class Conversation:
    """At most one system message, then turns: a user's message and, where the seed has one, its answer.

    `id` is ours (`source:row`, unique); `source_id` is the dump's own, which dumps repeat.
    """

    id: str
    messages: tuple[Message, ...]
    source_id: str | None = None
    category: str | None = None

    @property
    def system(self) -> tuple[Message, ...]:
        """The system message, or nothing: ready to be put before other messages."""
        return tuple(message for message in self.messages[:1] if message.role == "system")

    @property
    def content_hash(self) -> str:
        """sha256 of roles and texts: equal for two rows that say the same, whatever they are called."""
        texts = [(message.role, message.content) for message in self.messages]
        return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


class Reason(StrEnum):
    """Why a row was quarantined: the one enumeration of all stages."""

    # What a seed can be.
    UNDECODABLE = "undecodable"  # bytes that are not UTF-8
    BROKEN_JSON = "broken-json"
    UNKNOWN_FORMAT = "unknown-format"
    NOT_TEXT = "not-text"  # a turn whose text is no string, for example an image
    WRONG_ORDER = "wrong-order"
    EMPTY = "empty"
    NO_USER_TURN = "no-user-turn"
    TOO_LONG = "too-long"  # in characters when read, in tokens against the target's context
    DUPLICATE = "duplicate"
    # What can happen to it in the target.
    TEMPLATE_REFUSED = "template-refused"  # the chat template raised, for example on a system prompt
    TRUNCATED = "truncated"
    CONTEXT_FULL = "context-full"
    DEGENERATE_LOOP = "degenerate-loop"
    NOTHING_GENERATED = "nothing-generated"
    NON_FINITE = "non-finite"  # its hidden states
    KILLED_WORKER = "killed-worker"  # the process that worked on it ended, each time and on no other row


class RowRejected(Exception):
    """This row cannot be used; `detail` is for the person who reads the quarantine file."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class RejectedRow:
    """One quarantined row; `row` is anything that JSON and UTF-8 can carry."""

    id: str
    reason: Reason
    detail: str
    row: Any

    @classmethod
    def of(cls, id: str, rejected: RowRejected, row: Any) -> RejectedRow:
        """The record of a rejected row, made storable."""
        return cls(id, rejected.reason, encodable(rejected.detail), storable(row))


class Deduplicator:
    """Refuses a conversation that was seen before, across sources."""

    def __init__(self) -> None:
        self._first_seen: dict[str, str] = {}

    def check(self, conversation: Conversation) -> Conversation | RejectedRow:
        """The conversation itself where its roles and texts are new, else a `RejectedRow` that names the first."""
        first = self._first_seen.setdefault(conversation.content_hash, conversation.id)
        if first == conversation.id:
            return conversation
        return RejectedRow(conversation.id, Reason.DUPLICATE, f"The same as {first}.", asdict(conversation))


def encodable(text: str) -> str:
    """The text as UTF-8 can carry it: JSON's lone surrogates become U+FFFD, and so do undecodable bytes."""
    if text.isascii():
        return text
    paired = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return paired.replace(UNDECODABLE_MARK, "\ufffd")


def storable(value: Any, depth: int = 32) -> Any:
    """The nearest thing to `value` that standard JSON in UTF-8 can carry; nesting below `depth` is left out."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict | list | tuple):
        if depth == 0:
            return "…"
        if isinstance(value, dict):
            return {encodable(str(key)): storable(item, depth - 1) for key, item in value.items()}
        return [storable(item, depth - 1) for item in value]
    return f"a {type(value).__name__}"  # what only a Hub data set holds: an image, a date
