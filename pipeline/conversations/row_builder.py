"""A conversation as tokens: a row in the making, and the row that is kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeline.conversations.conversation import Message
from pipeline.conversations.requests import Finish
from pipeline.conversations.spans import Span


@dataclass(frozen=True)
class GeneratedRow:
    """A row for the heads to learn from: token ids, which of them the target wrote, and the same as text.

    `finish` has one entry per span. A conversation whose template rewrites history gives several rows, called
    `<parent_id>#<turn>`; otherwise `id` is `parent_id`.
    """

    id: str
    parent_id: str
    input_ids: list[int]
    spans: list[Span]
    finish: list[Finish]
    messages: tuple[Message, ...]

    @property
    def num_generated(self) -> int:
        """How many of the tokens the target wrote."""
        return sum(map(len, self.spans))


@dataclass(frozen=True)
class RowBuilder:
    """A row in the making. Every step makes a new one, so that a dropped turn leaves no trace."""

    first_turn: int
    ids: list[int]
    messages: tuple[Message, ...]
    spans: tuple[Span, ...] = ()
    finish: tuple[Finish, ...] = ()

    @property
    def ended(self) -> bool:
        """Whether its last text has an end of its own."""
        return self.finish[-1] == "stop"

    def read(self, ids: list[int], *messages: Message) -> RowBuilder:
        """With tokens that the target did not write."""
        return replace(self, ids=self.ids + ids, messages=self.messages + messages)

    def written(self, ids: list[int], finish: Finish, message: Message) -> RowBuilder:
        """With a text that the target wrote."""
        span = Span(len(self.ids), len(self.ids) + len(ids), message.role)
        return replace(self.read(ids, message), spans=(*self.spans, span), finish=(*self.finish, finish))

    def row(self, row_id: str, parent_id: str) -> GeneratedRow:
        """The finished row."""
        return GeneratedRow(row_id, parent_id, self.ids, list(self.spans), list(self.finish), self.messages)
