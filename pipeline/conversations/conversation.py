"""Conversations, and rows that are rejected.

Each row of each stage is either kept or quarantined with one of the reasons below. Code that looks
at one row raises `RowRejected`; its caller turns that into a `RejectedRow`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Mode = Literal[
    "replay", "self-talk", "passthrough"
]  # how a conversation is generated, see dialogue.py

SpecialTokens = Literal[
    "escape", "keep", "quarantine"
]  # what becomes of special tokens in a seed's text

UNDECODABLE_MARK = (
    "\ufdd0"  # replaces bytes that are not UTF-8; a code point reserved for internal use
)
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Message:
    """One turn's text; `tool_calls` are the functions that it calls, as JSON (see `tool_turns`)."""

    role: Role
    content: str
    tool_calls: str | None = None


@dataclass(frozen=True)
class Turn:
    """What is asked and, where the seed has one, its answer.

    `asked` is the user's message, and after it the functions that the seed's assistant called with
    their results.
    """

    asked: tuple[Message, ...]
    answer: str | None


@dataclass(frozen=True)
class Conversation:
    """At most one system message, then turns: a user's message and, where the seed has one, its
    answer.

    `id` is ours and unique (`source:row`); `source_id` is the dump's own and may repeat. `tools`
    are the functions that the assistant may call, as the JSON list that chat templates take.
    """

    id: str
    messages: tuple[Message, ...]
    source_id: str | None = None
    category: str | None = None
    tools: str | None = None

    @property
    def turns(self) -> list[Turn]:
        """The conversation after its system message; a call without a result is no answer."""
        turns: list[Turn] = []
        for message, after in zip(self.messages, (*self.messages[1:], None), strict=True):
            if message.role == "user":
                turns.append(Turn((message,), None))
            elif message.role == "tool" or (
                message.tool_calls is not None and after and after.role == "tool"
            ):
                turns[-1] = replace(turns[-1], asked=(*turns[-1].asked, message))
            elif message.role == "assistant" and message.tool_calls is None:
                turns[-1] = replace(turns[-1], answer=message.content)
        return turns

    @property
    def system(self) -> tuple[Message, ...]:
        """The system message as a tuple, which may be empty."""
        return tuple(message for message in self.messages[:1] if message.role == "system")

    def read_by(self, mode: Mode, rounds: int | None = None) -> tuple[Message, ...]:
        """The messages that generation reads of it: two conversations that agree in them are the
        same to it.

        Replay reads the first `rounds` questions, self-talk the first one, and passthrough the
        answers as well.
        """
        if mode == "passthrough":
            return self.messages
        if mode == "self-talk":
            return (*self.system, *self.turns[0].asked[:1])
        return (*self.system, *(message for turn in self.turns[:rounds] for message in turn.asked))


class Reason(StrEnum):
    """Why a row was quarantined, in any stage."""

    # In the seeds.
    UNDECODABLE = "undecodable"  # bytes that are not UTF-8, or half of a surrogate pair
    BROKEN_JSON = "broken-json"
    BROKEN_ROW = "broken-row"  # of a CSV: not as many fields as its header names
    UNKNOWN_FORMAT = "unknown-format"
    NOT_TEXT = "not-text"  # a turn whose text is no string, for example an image
    WRONG_ORDER = "wrong-order"
    EMPTY = "empty"
    TOOLS = "tools"  # it calls functions, where `seeds.tools` does not want them
    NO_USER_TURN = "no-user-turn"
    TOO_LONG = "too-long"  # in characters when read, in tokens against the target's context
    DUPLICATE = "duplicate"
    CONTAMINATED = "contaminated"  # it holds one of the check's questions
    # In the target.
    TEMPLATE_REFUSED = (
        "template-refused"  # the chat template raised, for example on a system prompt
    )
    SPECIAL_TOKENS = (
        "special-tokens"  # in its text, where `seeds.special_tokens` does not want them
    )
    TRUNCATED = "truncated"
    CONTEXT_FULL = "context-full"
    DEGENERATE_LOOP = "degenerate-loop"
    NOTHING_GENERATED = "nothing-generated"
    NON_FINITE = "non-finite"  # its hidden states
    KILLED_WORKER = "killed-worker"  # its worker process ended at each attempt, and on no other row


class RowRejected(Exception):
    """A row cannot be used; `detail` goes into the quarantine file."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class RejectedRow:
    """A quarantined row; `row` is any value that JSON in UTF-8 can hold."""

    id: str
    reason: Reason
    detail: str
    row: Any

    @classmethod
    def of(cls, id: str, rejected: RowRejected, row: Any) -> RejectedRow:
        """The record of a rejected row, made storable."""
        return cls(id, rejected.reason, encodable(rejected.detail), storable(row))


def utf8_text(text: str, what: str) -> str:
    """The text with surrogate pairs joined, as UTF-8 can hold it.

    Args:
        what: What the text is, as a detail names it: "a turn".

    Raises:
        RowRejected: It has half of a surrogate pair, or bytes that are not UTF-8.
    """
    if text.isascii():
        return text
    if UNDECODABLE_MARK in text:
        raise RowRejected(Reason.UNDECODABLE, f"There are bytes that are not UTF-8 in {what}.")
    paired = _paired(text)
    if half := SURROGATE.search(paired):
        place, escape = half.start() + 1, encodable(half[0])
        detail = f"Character {place:,} of {what} is half of a surrogate pair: {escape}."
        raise RowRejected(Reason.UNDECODABLE, detail)
    return paired


def encodable(text: str) -> str:
    """The text made valid UTF-8, for records.

    Half of a surrogate pair becomes its escape `\\udXXX`, and undecodable bytes become U+FFFD.
    """
    if text.isascii():
        return text
    escaped = _paired(text).encode("utf-8", "backslashreplace").decode()
    return escaped.replace(UNDECODABLE_MARK, "\ufffd")


def _paired(text: str) -> str:
    """The text with the two halves of each surrogate pair joined to one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def storable(value: Any, depth: int = 32) -> Any:
    """`value` as standard JSON in UTF-8, approximated where needed; nesting below `depth` is left
    out.
    """
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
    return f"a {type(value).__name__}"  # in Hub data sets: an image, a date
