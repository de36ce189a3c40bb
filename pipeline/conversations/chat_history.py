"""An interactive conversation as token ids: the prompt of each question, with earlier answers as
they were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.conversations.conversation import Message, Reason, RowRejected, utf8_text
from pipeline.conversations.row_builder import RowBuilder
from pipeline.conversations.template import ChatTemplate


class Chat:
    """The turns so far.

    Args:
        room: The longest prompt in tokens.
        system: A system message, if any.
    """

    def __init__(self, template: ChatTemplate, room: int, system: str | None = None):
        self._template, self._room = template, room
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
        message, builder = Message("user", utf8_text(question, "the question")), self._builder
        asked = builder.asked(self._template, [message]) if builder else None
        forgets = asked is not None and len(asked.ids) > self._room
        if asked is None or forgets:
            asked = RowBuilder.opening(self._template, (*self._system, message))
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
