"""Run many conversations on one generation engine at the same time.

The next turn of a conversation is requested as soon as the previous turn is answered. As many
conversations are open as the engine has capacity for. The others are queued, so that the prefixes
of open conversations stay in the engine's cache.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pipeline.conversations.dialogue import Dialogue
from pipeline.conversations.requests import Completion, TextCounts
from pipeline.storage.progress_file import SECONDS_BETWEEN_REPORTS
from pipeline.targets.engines import GenerationEngine

# called with the numbers of finished conversations, generated tokens and tokens left
Report = Callable[[int, int, int], None]


def report_nothing(conversations: int, tokens: int, tokens_left: int) -> None:
    """Do nothing: the `Report` of a caller that does not need the progress."""


@dataclass(eq=False)
class DialogueGroup:
    """Dialogues that were added to a pool together; `num_left` of them are unfinished."""

    dialogues: list[Dialogue]
    num_left: int
    report: Report
    texts: TextCounts = field(default_factory=TextCounts)

    def report_progress(self) -> None:
        """Report finished dialogues, tokens so far, and tokens left."""
        num_finished = len(self.dialogues) - self.num_left
        self.report(num_finished, self.texts.tokens, self.texts.tokens_left)


class DialoguePool:
    """Dialogues that run at the same time on one generation engine.

    The engine may be None if no dialogue makes a request.
    """

    def __init__(self, engine: GenerationEngine | None):
        self._engine = engine
        self._capacity = engine.capacity if engine else math.inf
        self._queued: deque[tuple[Dialogue, DialogueGroup]] = deque()
        self._waiting: dict[str, tuple[Dialogue, DialogueGroup]] = {}  # by request id
        self._lengths: dict[str, int] = {}  # of running texts, when they were last counted
        self._counted = -math.inf

    def add(self, dialogues: Iterable[Dialogue], report: Report = report_nothing) -> DialogueGroup:
        """Queue dialogues, and return them as a group; `report` receives their progress."""
        listed = list(dialogues)
        group = DialogueGroup(listed, len(listed), report)
        for dialogue in listed:
            group.texts.left += dialogue.texts_left
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
                owner.texts.end_text(len(completion.token_ids))
                owner.texts.running_tokens -= self._lengths.pop(completion.id, 0)
                self._advance_dialogue(dialogue, owner, completion)
            self._count_running()
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

    def _count_running(self) -> None:
        """Count and report the tokens of running texts, at most twice a second."""
        moment = time.monotonic()
        if moment - self._counted < SECONDS_BETWEEN_REPORTS:
            return
        assert self._engine is not None, "a text runs in an engine"
        self._counted = moment
        self._lengths = self._engine.lengths()
        tokens: Counter[DialogueGroup] = Counter()
        for name, length in self._lengths.items():
            _, group = self._waiting[name]
            tokens[group] += length
        for group, num_tokens in tokens.items():
            group.texts.running_tokens = num_tokens
            group.report_progress()

    def _advance_dialogue(
        self, dialogue: Dialogue, group: DialogueGroup, completion: Completion | None = None
    ) -> None:
        """Add a dialogue's next request to the engine; count the dialogue if it is finished.

        `completion` answers the last request.
        """
        texts_left = dialogue.texts_left
        if completion:
            dialogue.receive(completion)
        request = dialogue.next_request()
        group.texts.left += dialogue.texts_left - texts_left
        if request is None:
            group.num_left -= 1
            group.report_progress()
            return
        group.texts.longest = max(group.texts.longest, request.max_new_tokens)
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
