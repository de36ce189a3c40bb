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
class DialogueGroup:
    """Conversations that belong together, and how many of them are not over."""

    dialogues: list[Dialogue]
    num_left: int


class DialoguePool:
    """All conversations of one engine; without an engine only such as ask for nothing."""

    def __init__(self, engine: GenerationEngine | None):
        self._engine = engine
        self._seats = engine.capacity if engine else math.inf
        self._unopened: deque[tuple[Dialogue, DialogueGroup]] = deque()
        self._waiting: dict[str, tuple[Dialogue, DialogueGroup]] = {}  # for an answer, by the request's id

    def add(self, dialogues: Iterable[Dialogue]) -> DialogueGroup:
        """Queue conversations behind those that are queued already."""
        listed = list(dialogues)
        group = DialogueGroup(listed, len(listed))
        self._unopened.extend((dialogue, group) for dialogue in listed)
        return group

    def finish(self, group: DialogueGroup, add_more: Callable[[], None] = lambda: None) -> None:
        """Go on until these conversations are over; `add_more` is called whenever a seat is free and none is queued."""
        self._open(add_more)
        while group.num_left:
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

    def _go_on(self, dialogue: Dialogue, group: DialogueGroup) -> None:
        request = dialogue.next_request()
        if request is None:
            group.num_left -= 1
            return
        assert self._engine is not None, "without an engine nothing is asked for"
        self._waiting[request.id] = dialogue, group
        self._engine.add(request)


def converse(dialogues: Iterable[Dialogue], engine: GenerationEngine | None) -> None:
    """Hold all these conversations to their end."""
    pool = DialoguePool(engine)
    pool.finish(pool.add(dialogues))
