"""A conversation as tokens: a row that is being built, and the finished row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.conversations.conversation import Message
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

    @property
    def num_generated(self) -> int:
        """The number of tokens that the target wrote."""
        return sum(map(len, self.spans))


@dataclass(frozen=True)
class RowBuilder:
    """A row under construction. Immutable: each step returns a new one, so a turn is dropped by not
    using it.
    """

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
        """Append what is asked next; a new row from this `turn` on where the template rewrites
        history.
        """
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
