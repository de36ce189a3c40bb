"""A conversation with the target as a state machine that any engine can drive.

Call `next_request` and `receive` alternately until `next_request` returns None, then call `rows`. A
turn is a user's message and its answer. A row is a list of token ids that grows turn by turn and
holds every answer exactly as it was sampled. Three modes:

    replay       the seed's user messages one after another, each answered by the target; function
                 calls of the seed's assistant and their results are context without labels
    self-talk    the seed's first user message; then the target writes both roles, each after the
                 role's header in the chat template
    passthrough  the seed's own answers, tokenized as if the target had sampled them; makes no
                 requests; an answer that is marked not to learn has no span

The conversation ends early at a text that is a degenerate loop or empty (if `ends_at_flaws`), or is
cut off and not kept by `on_truncated`. This text is dropped, and so is a generated user message
without an answer. The conversation also ends when a prompt leaves no room in the context. The rows
keep all earlier turns, unless `on_truncated` rejects the whole conversation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.conversations.conversation import (
    Conversation,
    Message,
    Mode,
    Reason,
    RowRejected,
    SpecialTokens,
    Turn,
)
from pipeline.conversations.requests import (
    Completion,
    Finish,
    Request,
    Sampling,
    degenerate_loop,
    sample_seed,
)
from pipeline.conversations.row_builder import GeneratedRow, RowBuilder
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import ConfigError


@dataclass(frozen=True)
class DialogueSettings:
    """Settings of one conversation with the target (`generate` in the configuration).

    Attributes:
        mode: See the module's docstring.
        sampling: The sampling parameters of every request.
        max_tokens: The target's context length, the maximum length of a row in tokens.
        rounds: Maximum number of answers. None: one per question, in self-talk as many as fit into
            the context.
        on_truncated: What happens to a text cut off at `max_new_tokens`. keep: it is kept and the
            conversation continues; drop-turn: it is dropped and ends the conversation; quarantine:
            the conversation is rejected. A text cut off by the end of the context always ends the
            conversation, and is kept only with keep.
        seed: The run's seed.
        ends_at_flaws: Whether a degenerate loop or an empty text ends the conversation.
        answers_last: Whether the target also answers the last question. Without this answer, the
            last prompt is still built.
        special_tokens: What happens to special tokens in the seed's text. escape: they become plain
            text; keep: they stay control tokens.
    """

    mode: Mode
    sampling: Sampling
    max_tokens: int
    rounds: int | None = None
    on_truncated: Literal["keep", "drop-turn", "quarantine"] = "keep"
    seed: int = 0
    ends_at_flaws: bool = True
    answers_last: bool = True
    special_tokens: SpecialTokens = "escape"


def require_both_sides(template: ChatTemplate, mode: str) -> None:
    """Check that the chat template supports a mode.

    Raises:
        ConfigError: The mode is self-talk, and the template has no token that ends a user message.
    """
    if mode == "self-talk" and not template.end_ids["user"]:
        raise ConfigError(
            "The target cannot write the user's side: its chat template has no token that ends a"
            " user message.",
            "generate.mode: self-talk",
            "Use generate.mode=replay.",
        )


class Dialogue:
    """State machine of one conversation with the target; see the module's docstring.

    Args:
        conversation: The seed conversation.
        template: The target's chat template.
        settings: The mode, the limits, and how flaws are handled.
        sample: The number of this dialogue within its conversation, from 1.

    Attributes:
        id: The conversation's id, to which samples after the first add `~<sample>`.
        cut_at_tools: Whether the conversation ends early, at function calls that the chat template
            cannot render.
        unlearned_answers: Number of the seed's answers that are kept without a span.
    """

    def __init__(
        self,
        conversation: Conversation,
        template: ChatTemplate,
        settings: DialogueSettings,
        sample: int = 1,
    ):
        self.id = conversation.id
        if sample > 1:
            self.id += f"~{sample}"
        self._conversation = conversation
        self._settings = settings
        escapes = settings.special_tokens != "keep"
        self._template = template.variant(tools=conversation.tools, escapes=escapes)
        self.cut_at_tools = False
        self.unlearned_answers = 0
        self._turns = deque(self._usable_turns())
        self._unanswered: list[list[int]] = []  # the last prompt, if `answers_last` is False
        self._turn: Turn | None = None  # the last turn of the seed that was asked
        self._writer: Literal["user", "assistant"] = "assistant"
        self._builder: RowBuilder | None = None  # the conversation so far
        self._pending: RowBuilder | None = None  # the conversation up to the requested text
        self._rows: dict[int, RowBuilder] = {}  # rows that end with an answer, by their first turn
        self._num_requests = 0
        self._num_answers = 0
        self._ending: RowRejected | None = None

    @property
    def needs_answers(self) -> bool:
        """Whether the target still has to answer a question of the seed."""
        return len(self._turns) > (0 if self._settings.answers_last else 1)

    @property
    def texts_left(self) -> int:
        """The number of texts that the target still has to write, at most.

        It is 0 for self-talk without a limit of rounds.
        """
        settings = self._settings
        if self._ending is not None or settings.mode == "passthrough":
            return 0
        num_asked = len(self._turns) + (self._pending is not None)
        if self._turns and not settings.answers_last:
            num_asked -= 1
        rounds_left = num_asked
        if settings.rounds is not None:
            rounds_left = settings.rounds - self._num_answers
        if settings.mode == "replay":
            return min(num_asked, rounds_left)
        questions_left = rounds_left - (self._writer == "assistant")
        return max(0, rounds_left + questions_left)

    def next_request(self) -> Request | None:
        """Return the next request to an engine, or None if the conversation is over.

        In passthrough mode, this receives all of the seed's own answers and returns None.
        """
        request = self._build_request()
        while request is not None and self._settings.mode == "passthrough":
            # The seed's own answer, as if the target had written it.
            assert self._pending is not None
            assert self._turn is not None and self._turn.answer is not None
            ids = self._template.recite(self._pending.messages, self._turn.answer)
            finish: Finish = "stop" if len(ids) <= request.max_new_tokens else "length"
            self.receive(Completion(request.id, ids[: request.max_new_tokens], finish))
            request = self._build_request()
        return request

    def receive(self, completion: Completion) -> None:
        """Add the completion of the last request; an unusable text ends the conversation."""
        assert self._pending is not None, f"{completion.id} answers no request"
        builder, self._pending = self._pending, None
        ids, finish = completion.token_ids, completion.finished
        text_ids, end = ids, None
        if finish == "stop" and ids and ids[-1] in self._stop_token_ids():
            *text_ids, end = ids
        text = self._template.decode(text_ids)
        context_left = self._settings.max_tokens - len(builder.ids) - len(ids)
        self._ending = self._flaw(text_ids, text, finish, context_left)
        if self._ending is not None:
            return
        if self._writer == "assistant":
            text = self._template.content(text_ids)
        message = Message(self._writer, text)
        if self._settings.mode == "passthrough" and self._turn is not None:
            message = replace(message, learned=self._turn.learned)
            self.unlearned_answers += not message.learned
        self._builder = builder.with_text(ids, finish, message, end)
        if self._writer == "assistant":
            self._num_answers += 1
            if self._builder.spans:
                # Replaces the row so far, unless the template has rewritten history: then it is new
                self._rows[self._builder.first_turn] = self._builder
        if self._settings.mode == "self-talk":
            self._writer = "user" if self._writer == "assistant" else "assistant"

    def prompts(self) -> list[list[int]]:
        """Return the prompts of all kept texts as token ids, then the unanswered one, if any."""
        found = []
        for builder in self._rows.values():
            found += [builder.ids[: span.start] for span in builder.spans]
        return found + self._unanswered

    def rows(self) -> list[GeneratedRow]:
        """Return the training rows of the finished conversation.

        There are several rows only if the chat template rewrites history.

        Raises:
            RowRejected: There is no usable answer; the reason is the one that ended the
                conversation.
        """
        assert self._ending is not None, "the conversation is not over"
        if not self._rows:
            raise self._ending
        rows = []
        for turn, builder in self._rows.items():
            id = self.id if len(self._rows) == 1 else f"{self.id}#{turn}"
            rows.append(builder.finished(id, self._conversation.id))
        return rows

    def _usable_turns(self) -> list[Turn]:
        """Return the seed's turns, up to function calls that the chat template cannot render.

        The turn with these calls keeps only its question, and `cut_at_tools` becomes True.
        Self-talk drops all function calls, and passthrough drops all turns without an answer.
        """
        mode = self._settings.mode
        turns = []
        for turn in self._conversation.turns:
            if mode == "self-talk":
                turn = replace(turn, asked=turn.asked[:1])
            elif not self._renders(turn):
                self.cut_at_tools = True
                turn = Turn(turn.asked[:1], None)
            if mode != "passthrough" or turn.answer is not None:
                turns.append(turn)
            if self.cut_at_tools:
                break
        return turns

    def _renders(self, turn: Turn) -> bool:
        """Return whether the chat template renders a turn's function calls; True without calls."""
        if len(turn.asked) == 1:
            return True
        try:
            self._template.render((*self._conversation.system, *turn.asked), asks=True)
        except RowRejected:
            return False
        return self._template.renders_tools

    def _stop_token_ids(self) -> tuple[int, ...]:
        """Return the sorted token ids that end a text of the current writer."""
        return self._template.stop_ids(self._writer, self._settings.sampling.stop_token_ids)

    def _build_request(self) -> Request | None:
        """Build the next request and set `_pending`.

        If the conversation is over, set `_ending` and return None.
        """
        assert self._pending is None, "the last request has no answer yet"
        if self._ending is not None:
            return None
        try:
            builder = self._next_prompt()
        except RowRejected as ending:
            self._ending = ending
            return None
        settings, sampling = self._settings, self._settings.sampling
        room = settings.max_tokens - len(builder.ids)
        if room < 1:
            reason = Reason.CONTEXT_FULL if self._rows else Reason.TOO_LONG
            self._ending = RowRejected(
                reason,
                f"The prompt has {len(builder.ids)} tokens, the context {settings.max_tokens}.",
            )
            return None
        if not settings.answers_last and not self._turns:
            self._unanswered = [builder.ids]
            self._ending = RowRejected(
                Reason.NOTHING_GENERATED,
                "The last question is not to be answered.",
            )
            return None
        turn = self._num_requests
        self._num_requests += 1
        self._pending = builder
        if settings.mode != "passthrough":
            room = min(room, sampling.max_new_tokens)
        seed = None
        if sampling.temperature > 0:
            seed = sample_seed(settings.seed, self.id, turn)
        return Request(
            id=f"{self.id}/{turn}",
            prompt_ids=builder.ids,
            max_new_tokens=room,
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop_token_ids=self._stop_token_ids(),
        )

    def _next_prompt(self) -> RowBuilder:
        """Build the token row up to the start of the next sampled text.

        Raises:
            RowRejected: No question or round is left, or a message cannot be rendered or tokenized.
        """
        builder, template = self._builder, self._template
        if self._num_answers == self._settings.rounds:
            raise RowRejected(Reason.NOTHING_GENERATED, "All rounds are over.")
        if builder is not None and "user" in (self._writer, builder.messages[-1].role):
            return builder.continued(template, (), self._num_answers, self._writer)
        if not self._turns:
            raise RowRejected(
                Reason.NOTHING_GENERATED,
                "The seed has no question, or for passthrough no answer to learn.",
            )
        turn = self._turn = self._turns.popleft()
        if builder is None:
            messages = (*self._conversation.system, *turn.asked)
            return RowBuilder.opening(template, messages, self._num_answers)
        return builder.continued(template, turn.asked, self._num_answers)

    def _flaw(
        self, ids: list[int], text: str, finish: Finish, context_left: int
    ) -> RowRejected | None:
        """Return why a sampled text ends the conversation, or None if the text is usable.

        If the text was cut off at `max_new_tokens` and `on_truncated` is quarantine, all rows are
        dropped.
        """
        policy, writer = self._settings.on_truncated, self._writer
        if self._settings.ends_at_flaws:
            if degenerate_loop(ids):
                return RowRejected(Reason.DEGENERATE_LOOP, f"The {writer}'s text ends in a loop.")
            if not text:
                return RowRejected(Reason.NOTHING_GENERATED, f"The {writer}'s text is empty.")
        if finish == "stop" or policy == "keep":
            return None
        if context_left < 1:
            return RowRejected(Reason.CONTEXT_FULL, "The context ended within the text.")
        if policy == "quarantine":
            self._rows.clear()
        return RowRejected(
            Reason.TRUNCATED,
            f"The {writer}'s text was cut after {len(ids)} tokens.",
        )
