"""Run many conversations on one generation engine at the same time.

The next turn of a conversation is requested as soon as the previous turn is answered. As many
conversations are open as the engine has capacity for. The others are queued, so that the prefixes
of open conversations stay in the engine's cache.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeline.conversations.dialogue import Dialogue
from pipeline.targets.engines import GenerationEngine

# called with the numbers of newly finished conversations and newly generated tokens
Report = Callable[[int, int], None]


def report_nothing(conversations: int, tokens: int) -> None:
    """Do nothing: the `Report` of a caller that does not need the progress."""


@dataclass
class DialogueGroup:
    """Dialogues that were added to a pool together; `num_left` of them are unfinished."""

    dialogues: list[Dialogue]
    num_left: int
    report: Report


class DialoguePool:
    """Dialogues that run at the same time on one generation engine.

    The engine may be None if no dialogue makes a request.
    """

    def __init__(self, engine: GenerationEngine | None):
        self._engine = engine
        self._capacity = engine.capacity if engine else math.inf
        self._queued: deque[tuple[Dialogue, DialogueGroup]] = deque()
        self._waiting: dict[str, tuple[Dialogue, DialogueGroup]] = {}  # by request id

    def add(self, dialogues: Iterable[Dialogue], report: Report = report_nothing) -> DialogueGroup:
        """Queue dialogues, and return them as a group; `report` receives their progress."""
        listed = list(dialogues)
        group = DialogueGroup(listed, len(listed), report)
        for dialogue in listed:
            self._queued.append((dialogue, group))
        return group

    def finish(self, group: DialogueGroup, add_more: Callable[[], None] = lambda: None) -> None:
        """Run the engine until all dialogues of a group are finished.

        Dialogues of other groups advance at the same time. `add_more` is called whenever the engine
        has capacity and no dialogue is queued; it may `add` another group.
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
        """Start queued dialogues while the engine has capacity; `add_more` may queue others."""
        while len(self._waiting) < self._capacity:
            if not self._queued:
                add_more()
            if not self._queued:
                return
            dialogue, group = self._queued.popleft()
            self._advance_dialogue(dialogue, group)

    def _advance_dialogue(self, dialogue: Dialogue, group: DialogueGroup) -> None:
        """Add a dialogue's next request to the engine; count the dialogue if it is finished."""
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
    """Run dialogues on a generation engine until all are finished.

    `engine` may be None if no dialogue makes a request.
    """
    pool = DialoguePool(engine)
    pool.finish(pool.add(dialogues, report))
