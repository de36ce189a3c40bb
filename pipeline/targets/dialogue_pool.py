"""Run many conversations of a shard on one generation engine at the same time.

The next turn of a conversation is requested as soon as its last turn is answered.

As many conversations are open as the engine has capacity for. The others are queued, so that the
prefixes of open conversations stay in the engine's cache. When the queue is empty, the caller may
add more.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.conversations.dialogue import Dialogue
from pipeline.targets.engines import GenerationEngine

# called with numbers of finished conversations and generated tokens as they come
Report = Callable[[int, int], None]


def report_nothing(conversations: int, tokens: int) -> None:
    """Report no progress of the dialogues on the target's engine."""


@dataclass
class DialogueGroup:
    """The dialogues of one shard in a pool, and the number of unfinished ones."""

    dialogues: list[Dialogue]
    num_left: int
    report: Report


class DialoguePool:
    """A pool of dialogues that run at the same time on one generation engine.

    The engine may be None if no dialogue makes a request.
    """

    def __init__(self, engine: GenerationEngine | None):
        self._engine = engine
        self._capacity = engine.capacity if engine else math.inf
        self._queued: deque[tuple[Dialogue, DialogueGroup]] = deque()
        self._waiting: dict[str, tuple[Dialogue, DialogueGroup]] = {}  # by request id

    def add(self, dialogues: Iterable[Dialogue], report: Report = report_nothing) -> DialogueGroup:
        """Queue a shard's dialogues for the target's engine; return them as a group."""
        listed = list(dialogues)
        group = DialogueGroup(listed, len(listed), report)
        for dialogue in listed:
            self._queued.append((dialogue, group))
        return group

    def finish(self, group: DialogueGroup, add_more: Callable[[], None] = lambda: None) -> None:
        """Run the target's engine until all dialogues of a group are finished.

        Dialogues of other groups run along. `add_more` is called whenever the engine has capacity
        and no dialogue is queued.
        """
        self._open_dialogues(add_more)
        while group.num_left:
            assert self._engine is not None, "a request needs an engine"
            for completion in self._engine.step():
                dialogue, owner = self._waiting.pop(completion.id)
                dialogue.receive(completion)
                owner.report(0, len(completion.token_ids))
                self._advance_dialogue(dialogue, owner)
            self._open_dialogues(add_more)

    def _open_dialogues(self, add_more: Callable[[], None]) -> None:
        """Start queued dialogues while the target's generation engine has capacity for requests."""
        while len(self._waiting) < self._capacity:
            if not self._queued:
                add_more()
            if not self._queued:
                return
            dialogue, group = self._queued.popleft()
            self._advance_dialogue(dialogue, group)

    def _advance_dialogue(self, dialogue: Dialogue, group: DialogueGroup) -> None:
        """Pass a dialogue's next request to the target's engine, or count a finished dialogue."""
        request = dialogue.next_request()
        if request is None:
            group.num_left -= 1
            group.report(1, 0)
            return
        assert self._engine is not None, "a request needs an engine"
        self._waiting[request.id] = dialogue, group
        self._engine.add(request)


def run_dialogues(
    dialogues: Iterable[Dialogue], engine: GenerationEngine | None, report: Report = report_nothing
) -> None:
    """Run the target's engine until all of these dialogues have ended."""
    pool = DialoguePool(engine)
    pool.finish(pool.add(dialogues, report))
