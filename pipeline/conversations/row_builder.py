"""Token rows of conversations: a row builder, finished training rows, and interactive chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.conversations.conversation import Message, Reason, Role, RowRejected, utf8_text
from pipeline.conversations.requests import Finish
from pipeline.conversations.spans import Span
from pipeline.conversations.template import ChatTemplate


@dataclass(frozen=True)
class GeneratedRow:
    """A generated training row: token ids, target-written spans, and the messages as text.

    `finish` has one entry per span. `parent_id` is the seed's id, and so is `id`, with two
    exceptions. Samples of a seed after the first add `~<sample>`. If the chat template rewrites
    history, a conversation is split into rows, and each row adds `#<turn>`.
    """

    id: str
    parent_id: str
    input_ids: list[int]
    spans: list[Span]
    finish: list[Finish]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class RowBuilder:
    """Immutable builder of a conversation's token row; the `with_` methods return a new builder.

    Attributes:
        first_turn: The index of the row's first turn in the conversation.
        end: The token that ended the last sampled text; None if it was cut.
    """

    first_turn: int
    ids: list[int]
    messages: tuple[Message, ...]
    spans: tuple[Span, ...] = ()
    finish: tuple[Finish, ...] = ()
    end: int | None = None

    @classmethod
    def opening(
        cls,
        template: ChatTemplate,
        messages: tuple[Message, ...],
        first_turn: int = 0,
        writer: Role = "assistant",
    ) -> RowBuilder:
        """Start a token row with the prompt for a text of this role after these messages."""
        return cls(first_turn, template.opening(messages, writer), messages)

    def continued(
        self,
        template: ChatTemplate,
        asked: Sequence[Message],
        turn: int = 0,
        writer: Role = "assistant",
    ) -> RowBuilder:
        """Append the prompt of the next text, or start a new row if the ids cannot be continued.

        Args:
            asked: The next question, followed by function calls and their results; empty beside a
                sampled question.
            turn: The `first_turn` of a new row.
            writer: The role of the next text.

        Raises:
            RowRejected: The messages cannot be rendered or tokenized.
        """
        ids = template.continuation(self.messages, asked, writer, self.end)
        if ids is None:
            return RowBuilder.opening(template, (*self.messages, *asked), turn, writer)
        return self.with_ids(ids, *asked)

    def with_ids(self, ids: list[int], *messages: Message) -> RowBuilder:
        """Append prompt tokens and their messages to the token row, without a span."""
        return replace(self, ids=self.ids + ids, messages=self.messages + messages)

    def with_text(
        self, ids: list[int], finish: Finish, message: Message, end: int | None
    ) -> RowBuilder:
        """Append a sampled text to the token row, with its span, finish reason and end token.

        A message that is not learned has no span and no finish reason.
        """
        builder = replace(self.with_ids(ids, message), end=end)
        if not message.learned:
            return builder
        span = Span(len(self.ids), len(self.ids) + len(ids), message.role)
        return replace(builder, spans=(*self.spans, span), finish=(*self.finish, finish))

    def finished(self, row_id: str, parent_id: str) -> GeneratedRow:
        """Return the finished training row."""
        return GeneratedRow(
            row_id, parent_id, self.ids, list(self.spans), list(self.finish), self.messages
        )


class Chat:
    """Interactive chat whose prompts hold earlier answers as the token ids that were sampled.

    Args:
        template: The target's chat template.
        room: The maximum number of prompt tokens.
        system: A system message, if any.
    """

    def __init__(self, template: ChatTemplate, room: int, system: str | None = None):
        self._template = template
        self._room = room
        self._system = (Message("system", system),) if system else ()
        self._builder: RowBuilder | None = None
        self._asked: RowBuilder | None = None

    def ask(self, question: str) -> tuple[list[int], bool]:
        """Return the prompt's token ids, and whether earlier turns were dropped to make room.

        Raises:
            RowRejected: The question alone is too long, has invalid characters, or cannot be
                rendered or tokenized. The history is unchanged.
        """
        message = Message("user", utf8_text(question))
        alone = RowBuilder.opening(self._template, (*self._system, message))
        asked = self._builder.continued(self._template, [message]) if self._builder else alone
        forgets = len(asked.ids) > self._room
        if forgets:
            asked = alone
        if len(asked.ids) > self._room:
            raise RowRejected(
                Reason.TOO_LONG,
                f"The prompt has {len(asked.ids)} tokens; the limit is {self._room}.",
            )
        self._asked = asked
        return asked.ids, forgets

    def answered(self, ids: Sequence[int], *, ended: bool) -> None:
        """Append the last question and its sampled answer; without ids, drop the question.

        `ended` is True if the last id is the token that ends the answer.
        """
        assert self._asked is not None, "nothing was asked"
        if ids:
            text = list(ids)
            end = text.pop() if ended else None
            message = Message("assistant", self._template.content(text))
            finish: Finish = "stop" if ended else "length"
            self._builder = self._asked.with_text(list(ids), finish, message, end)
        self._asked = None
