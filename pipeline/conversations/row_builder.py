"""A conversation as tokens: the row under construction, the finished row, and an interactive
conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.conversations.conversation import Message, Reason, RowRejected, utf8_text
from pipeline.conversations.requests import Finish
from pipeline.conversations.spans import Span
from pipeline.conversations.template import ChatTemplate


@dataclass(frozen=True)
class GeneratedRow:
    """A training row: token ids, the spans that the target wrote, and the messages as text.

    `finish` has one entry per span. A conversation whose template rewrites history is split into
    rows named `<parent_id>#<turn>`; otherwise `id` is `parent_id`.
    """

    id: str
    parent_id: str
    input_ids: list[int]
    spans: list[Span]
    finish: list[Finish]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class RowBuilder:
    """A row under construction. Each step returns a new one: a turn is dropped by not using it."""

    first_turn: int
    ids: list[int]
    messages: tuple[Message, ...]
    spans: tuple[Span, ...] = ()
    finish: tuple[Finish, ...] = ()

    @classmethod
    def opening(
        cls, template: ChatTemplate, messages: tuple[Message, ...], first_turn: int = 0
    ) -> RowBuilder:
        """A row that begins with these messages, the last of which is a question."""
        return cls(first_turn, template.opening(messages), messages)

    @property
    def ended(self) -> bool:
        """Whether the last text ended with an end token."""
        return self.finish[-1] == "stop"

    def asked(self, template: ChatTemplate, asked: Sequence[Message], turn: int = 0) -> RowBuilder:
        """Append the next question; start a new row if the template rewrites history."""
        messages = (*self.messages, *asked)
        if template.rewrites_history(self.messages, asked):
            return RowBuilder.opening(template, messages, turn)
        return self.read(template.separator(self.messages[:-1], self.ended, *asked), *asked)

    def read(self, ids: list[int], *messages: Message) -> RowBuilder:
        """Append tokens that the target did not write."""
        return replace(self, ids=self.ids + ids, messages=self.messages + messages)

    def written(self, ids: list[int], finish: Finish, message: Message) -> RowBuilder:
        """Append a text that the target wrote."""
        span = Span(len(self.ids), len(self.ids) + len(ids), message.role)
        return replace(
            self.read(ids, message), spans=(*self.spans, span), finish=(*self.finish, finish)
        )

    def row(self, row_id: str, parent_id: str) -> GeneratedRow:
        """The finished row."""
        return GeneratedRow(
            row_id, parent_id, self.ids, list(self.spans), list(self.finish), self.messages
        )


class Chat:
    """An interactive conversation: the prompt of each question, with earlier answers as they were
    sampled.

    Args:
        room: The longest prompt in tokens.
        system: A system message, if any.
    """

    def __init__(self, template: ChatTemplate, room: int, system: str | None = None):
        self._template = template
        self._room = room
        self._system = (Message("system", system),) if system else ()
        self._builder: RowBuilder | None = None
        self._asked: RowBuilder | None = None

    def ask(self, question: str) -> tuple[list[int], bool]:
        """The ids up to where the answer begins, and whether earlier turns were dropped to make
        room.

        Raises:
            RowRejected: The question alone is too long or undecodable, or the template rejects it;
                the history is unchanged.
        """
        message = Message("user", utf8_text(question, "the question"))
        alone = RowBuilder.opening(self._template, (*self._system, message))
        asked = self._builder.asked(self._template, [message]) if self._builder else alone
        forgets = len(asked.ids) > self._room
        if forgets:
            asked = alone
        if len(asked.ids) > self._room:
            detail = f"This takes {len(asked.ids)} tokens, and there is room for {self._room}."
            raise RowRejected(Reason.TOO_LONG, detail)
        self._asked = asked
        return asked.ids, forgets

    def answered(self, ids: Sequence[int], *, ended: bool) -> None:
        """Append the answer, including its end token where it `ended`; without ids the question is
        dropped.
        """
        assert self._asked is not None, "nothing was asked"
        if ids:
            message = Message("assistant", self._template.decode(ids))
            self._builder = self._asked.written(list(ids), "stop" if ended else "length", message)
        self._asked = None
