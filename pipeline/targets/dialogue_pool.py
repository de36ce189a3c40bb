"""Many conversations at once with one engine: each one's next turn is asked for the moment its last one is answered.

As many are open as the engine has seats for. The others wait, so that those that have begun find their own beginning
still in the prefix cache; and when none waits any more, whoever has further conversations may add them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.conversations.dialogue import Dialogue
from pipeline.targets.protocol import GenerationEngine


@dataclass
class Talk:
    """Conversations that belong together, and how many of them are not over."""

    dialogues: list[Dialogue]
    num_left: int


class Talks:
    """All conversations of one engine; without an engine only such as ask for nothing."""

    def __init__(self, engine: GenerationEngine | None):
        self._engine = engine
        self._seats = engine.capacity if engine else math.inf
        self._unopened: deque[tuple[Dialogue, Talk]] = deque()
        self._waiting: dict[str, tuple[Dialogue, Talk]] = {}  # for an answer, by the request's id

    def add(self, dialogues: Iterable[Dialogue]) -> Talk:
        """Queue conversations behind those that are queued already."""
        listed = list(dialogues)
        talk = Talk(listed, len(listed))
        self._unopened.extend((dialogue, talk) for dialogue in listed)
        return talk

    def finish(self, talk: Talk, add_more: Callable[[], None] = lambda: None) -> None:
        """Go on until these conversations are over; `add_more` is called whenever a seat is free and none is queued."""
        self._open(add_more)
        while talk.num_left:
            assert self._engine is not None, "without an engine nothing is asked for"
            for completion in self._engine.step():
                dialogue, owner = self._waiting.pop(completion.id)
                dialogue.receive(completion)
                self._go_on(dialogue, owner)
            self._open(add_more)

    def _open(self, add_more: Callable[[], None]) -> None:
        self._fill_seats()
        if not self._unopened and len(self._waiting) < self._seats:
            add_more()
            self._fill_seats()

    def _fill_seats(self) -> None:
        while self._unopened and len(self._waiting) < self._seats:
            self._go_on(*self._unopened.popleft())

    def _go_on(self, dialogue: Dialogue, talk: Talk) -> None:
        request = dialogue.next_request()
        if request is None:
            talk.num_left -= 1
            return
        assert self._engine is not None, "without an engine nothing is asked for"
        self._waiting[request.id] = dialogue, talk
        self._engine.add(request)


def converse(dialogues: Iterable[Dialogue], engine: GenerationEngine | None) -> None:
    """Hold all these conversations to their end."""
    talks = Talks(engine)
    talks.finish(talks.add(dialogues))
