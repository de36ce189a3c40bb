"""The dialogue of `medusa-distill chat`, with a person or with lines from a pipe."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter

import torch
from rich.console import Console

from pipeline.api.models import Target
from pipeline.conversations.conversation import RowRejected
from pipeline.conversations.requests import TextStream
from pipeline.conversations.row_builder import Chat
from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.decoder import Decoder
from pipeline.formatting import rate, ratio, visible

ACCEPTED_STYLE = "green"
GREETING = "Hello"
NUM_WARM_UP_TOKENS = 8
HELP = (
    f"[{ACCEPTED_STYLE}]Green[/] tokens are accepted guesses of the heads. Ctrl-C ends an answer,"
    " Ctrl-D the chat."
)


@dataclass(frozen=True)
class Sampling:
    """Decoding settings of a chat; answer n, counted from 0, has the seed `seed` + n."""

    max_new_tokens: int
    rule: AcceptanceRule
    seed: int


@dataclass
class Answer:
    """An answer in a chat: its token ids, and the steps and seconds after the prefill."""

    ids: list[int]
    num_steps: int = -1
    started: float = 0.0  # at the prefill's end, in seconds
    seconds: float = 0.0
    stopped: bool = False  # by Ctrl-C

    def add(self, new_ids: list[int]) -> None:
        """Append the tokens of one forward pass to the answer, and update its steps and seconds."""
        now = perf_counter()
        if not self.ids:
            self.started = now
        self.seconds = now - self.started
        self.ids += new_ids
        self.num_steps += 1

    def speed(self) -> str:
        """Describe the answer's number of tokens, tokens per step and tokens per second."""
        line = f"{len(self.ids)} tokens"
        if self.num_steps > 0 and self.seconds > 0:
            decoded = len(self.ids) - 1
            line += f", {ratio(decoded / self.num_steps)} per step"
            line += f", {rate(decoded / self.seconds)} tokens/s"
        return line


class ChatSession:
    """A chat in the terminal that leaves room for an answer in every prompt.

    The room is `max_new_tokens`, but at most half of the context. The constructor decodes a few
    tokens to warm up.

    Args:
        system: A system message, or None.
        console: For the answers.
        notes: For everything else.
    """

    def __init__(
        self,
        target: Target,
        decoder: Decoder,
        sampling: Sampling,
        system: str | None,
        console: Console,
        notes: Console,
    ):
        self.target, self.decoder, self.sampling = target, decoder, sampling
        self.console, self.notes = console, notes
        context = decoder.max_length
        room = context - min(sampling.max_new_tokens, context // 2)
        self.conversation = Chat(target.template, room, system)
        self.num_answers = 0
        decoder.generate(target.prompt(GREETING), NUM_WARM_UP_TOKENS)

    def answer_lines(self, lines: Iterable[str]) -> None:
        """Answer each line that is not blank, such as those from a pipe."""
        for line in lines:
            if line.strip():
                self.answer(line.strip())

    def answer_person(self) -> None:
        """Answer a person's questions until Ctrl-D; Ctrl-C ends an answer or clears the line."""
        import readline  # noqa: F401 - arrow keys and history in input()

        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.notes.print(HELP)
        while True:
            try:
                question = input("\n> ").strip()
            except EOFError:
                self.notes.print()
                return
            except KeyboardInterrupt:
                self.notes.print("\nCtrl-D ends the chat.", style="dim")
                continue
            if question:
                self.answer(question)

    def answer(self, question: str) -> None:
        """Print the answer to a question, and then its speed."""
        try:
            prompt, forgets = self.conversation.ask(question)
        except RowRejected as rejected:
            self.notes.print(f"This question cannot be asked: {rejected.detail}", markup=False)
            return
        if forgets:
            self.notes.print("The context is full: earlier turns are forgotten.", style="yellow")
        answer = self.decode(prompt)
        ended = bool(answer.ids) and answer.ids[-1] in self.decoder.eos_token_ids
        self.conversation.answered(answer.ids, ended=ended)
        line = answer.speed()
        if answer.stopped:
            line += " (stopped)"
        elif not ended:
            line += " (cut)"
        self.notes.print(line, style="dim", markup=False)

    def decode(self, prompt: list[int]) -> Answer:
        """Decode an answer and print each token at once; accepted guesses are green.

        After Ctrl-C in a terminal, the answer ends with the tokens that are decoded.
        """
        rule, generator = self.sampling.rule, None
        if rule.samples:
            seed = self.sampling.seed + self.num_answers
            generator = torch.Generator(self.decoder.device).manual_seed(seed)
        self.num_answers += 1
        text, answer = TextStream(self.target.tokenizer), Answer([])
        steps = self.decoder.stream(prompt, self.sampling.max_new_tokens, rule, generator)
        try:
            with closing(steps):  # removes the decoder's hook from the target
                for new_ids in steps:
                    answer.add(new_ids)
                    for place, token in enumerate(new_ids):
                        style = ACCEPTED_STYLE if place else None
                        piece = visible(text.push(token))
                        self.console.out(piece, style=style, end="", highlight=False)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            answer.stopped = True
        self.console.out(visible(text.flush()), highlight=False)
        return answer
