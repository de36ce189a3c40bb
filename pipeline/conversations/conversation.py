"""Conversations of messages, and rejected rows with their reasons.

Every stage keeps or quarantines each of its rows. Code that reads one row raises `RowRejected`; the
caller turns the exception into a `RejectedRow`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
Mode = Literal["replay", "self-talk", "passthrough"]  # of generation, see dialogue.py
SpecialTokens = Literal["escape", "keep"]  # in a seed's text


@dataclass(frozen=True)
class Message:
    """A message; `tool_calls` is a JSON list of its function calls (see `repair`), or None.

    `learned` is False for a seed's answer that is marked not to learn; only passthrough reads it.
    """

    role: Role
    content: str
    tool_calls: str | None = None
    learned: bool = True

    @property
    def uses_tools(self) -> bool:
        """Whether the message has function calls or is the result of one."""
        return self.role == "tool" or self.tool_calls is not None

    @property
    def text(self) -> str:
        """The message's content, followed by its function calls as JSON."""
        return self.content + (self.tool_calls or "")


@dataclass(frozen=True)
class Turn:
    """A user's question, and the seed's answer to it.

    `asked` is the user's message, followed by the function calls of the seed's assistant with their
    results. `answer` is None if the seed has none, and `learned` comes from its message.
    """

    asked: tuple[Message, ...]
    answer: str | None
    learned: bool = True


@dataclass(frozen=True)
class Conversation:
    """A conversation: at most one system message, then the turns of user and assistant.

    `id` is unique (`source:row`); `source_id` is the id in the seed file and may repeat. `category`
    is the category of a benchmark question. `tools` are the functions that the assistant may call,
    as the JSON list that chat templates take.
    """

    id: str
    messages: tuple[Message, ...]
    source_id: str | None = None
    category: str | None = None
    tools: str | None = None

    @property
    def turns(self) -> list[Turn]:
        """The turns of the conversation, without function calls that have no result."""
        turns = []
        for number, message in enumerate(self.messages):
            after = self.messages[number + 1 : number + 2]
            if message.role == "user":
                turns.append(Turn((message,), None))
            elif message.role == "assistant" and message.tool_calls is None:
                turns[-1] = replace(turns[-1], answer=message.content, learned=message.learned)
            elif message.role == "tool" or (after and after[0].role == "tool"):
                turns[-1] = replace(turns[-1], asked=(*turns[-1].asked, message))
        return turns

    @property
    def system(self) -> tuple[Message, ...]:
        """The system message as a tuple, which is empty if there is none."""
        return self.messages[:1] if self.messages[0].role == "system" else ()

    def read_by(self, mode: Mode, rounds: int | None) -> tuple[Message, ...]:
        """Return the messages of this seed that generation reads in a mode.

        Replay reads the system message and the first `rounds` questions (all if None), with their
        function calls and results. Self-talk reads the system message and the first question.
        Passthrough reads all messages.
        """
        if mode == "passthrough":
            return self.messages
        if mode == "self-talk":
            return (*self.system, *self.turns[0].asked[:1])
        return (*self.system, *(message for turn in self.turns[:rounds] for message in turn.asked))


class Reason(StrEnum):
    """Reasons for which a stage quarantines a row."""

    # Found when seeds are read.
    UNDECODABLE = "undecodable"  # bytes that are not UTF-8, or half of a surrogate pair
    BROKEN_JSON = "broken-json"
    BROKEN_ROW = "broken-row"  # of a CSV file: not as many fields as the header has
    UNKNOWN_FORMAT = "unknown-format"
    NOT_TEXT = "not-text"  # a turn whose text is no string, for example an image
    WRONG_ORDER = "wrong-order"
    EMPTY = "empty"
    NO_USER_TURN = "no-user-turn"
    TOO_LONG = "too-long"  # for the target's context, or above a limit of characters
    DUPLICATE = "duplicate"
    CONTAMINATED = "contaminated"  # it holds one of the check's questions
    # Found when the target runs.
    TEMPLATE_REFUSED = "template-refused"  # by the chat template, for example a system prompt
    SPECIAL_TOKENS = "special-tokens"  # one that cannot be written as plain text
    TRUNCATED = "truncated"
    CONTEXT_FULL = "context-full"
    DEGENERATE_LOOP = "degenerate-loop"
    NOTHING_GENERATED = "nothing-generated"
    NON_FINITE = "non-finite"  # its hidden states
    KILLED_WORKER = "killed-worker"  # the row ended its worker process at each attempt


class RowRejected(Exception):
    """Raised for an unusable row; `reason` and `detail` are written to the quarantine file."""

    def __init__(self, reason: Reason, detail: str):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True)
class RejectedRow:
    """A quarantined row with its reason; `row` can be written as JSON in UTF-8."""

    id: str
    reason: Reason
    detail: str
    row: Any

    @classmethod
    def of(cls, id: str, rejected: RowRejected, row: Any) -> RejectedRow:
        """Create the record of a rejected row from the exception that rejected it.

        The record holds `row` as `storable_json` converts it.
        """
        return cls(id, rejected.reason, storable_json(rejected.detail), storable_json(row))


def utf8_text(text: str) -> str:
    """Return a text unchanged after checking that UTF-8 can encode it.

    Raises:
        RowRejected: The text has a lone surrogate, which may stand for bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = f"Character {error.start + 1:,} of a text"
        raise RowRejected(
            Reason.UNDECODABLE,
            f"{place} is not UTF-8, or half of a surrogate pair.",
        ) from None
    return text


def storable_json(value: Any) -> Any:
    """Convert a value, such as a rejected row, to one that JSON in UTF-8 can hold.

    A value that JSON does not have becomes `a TYPE`, a number that is not finite becomes text, and
    a value that is nested too deeply becomes `…`.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=_type_name, skipkeys=True)
        encoded = text.encode("utf-8", "xmlcharrefreplace")  # lone surrogates as `&#56320;`
        return json.loads(encoded, parse_constant=str)
    except RecursionError:
        return "…"


def _type_name(value: object) -> str:
    """Return `a TYPE` for a value of a Hub data set, such as an image or a date."""
    return f"a {type(value).__name__}"
