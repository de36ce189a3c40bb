"""Token rows of conversations: a row builder, finished training rows, and interactive chats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.conversations.conversation import Message, Reason, RowRejected, utf8_text
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

    `first_turn` is the index of the row's first turn in the conversation; `ended` is whether the
    last sampled text ended with a stop token.
    """

    first_turn: int
    ids: list[int]
    messages: tuple[Message, ...]
    spans: tuple[Span, ...] = ()
    finish: tuple[Finish, ...] = ()
    ended: bool = False

    @classmethod
    def opening(
        cls, template: ChatTemplate, messages: tuple[Message, ...], first_turn: int = 0
    ) -> RowBuilder:
        """Start a token row with the prompt for an answer to these messages."""
        return cls(first_turn, template.opening(messages), messages)

    def with_question(
        self, template: ChatTemplate, asked: Sequence[Message], turn: int = 0
    ) -> RowBuilder:
        """Append the next question, or start a new row if the chat template rewrites history.

        Args:
            asked: The question, followed by function calls and their results.
            turn: The `first_turn` of a new row.

        Raises:
            RowRejected: The messages cannot be rendered or tokenized.
        """
        messages = (*self.messages, *asked)
        if template.rewrites_history(self.messages, asked):
            return RowBuilder.opening(template, messages, turn)
        ids = template.separator(self.messages[:-1], "assistant", self.ended, *asked)
        return self.with_ids(ids, *asked)

    def with_ids(self, ids: list[int], *messages: Message) -> RowBuilder:
        """Append prompt tokens and their messages to the token row, without a span."""
        return replace(self, ids=self.ids + ids, messages=self.messages + messages)

    def with_text(self, ids: list[int], finish: Finish, message: Message) -> RowBuilder:
        """Append a sampled text to the token row, with its span and finish reason.

        A message that is not learned has neither.
        """
        builder = replace(self.with_ids(ids, message), ended=finish == "stop")
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
        asked = self._builder.with_question(self._template, [message]) if self._builder else alone
        forgets = len(asked.ids) > self._room
        if forgets:
            asked = alone
        if len(asked.ids) > self._room:
            raise RowRejected(
                Reason.TOO_LONG,
                f"This takes {len(asked.ids)} tokens, and there is room for {self._room}.",
            )
        self._asked = asked
        return asked.ids, forgets

    def answered(self, ids: Sequence[int], *, ended: bool) -> None:
        """Append the last question and its sampled answer; without ids, drop the question.

        `ended` is True if the last id is the token that ends the answer.
        """
        assert self._asked is not None, "nothing was asked"
        if ids:
            message = Message("assistant", self._template.decode(ids))
            self._builder = self._asked.with_text(list(ids), "stop" if ended else "length", message)
        self._asked = None
