"""`medusa-distill chat`: chat with the accelerated model; accepted guesses are shown in colour."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from pipeline.conversations.conversation import RowRejected, utf8_text
from pipeline.errors import ConfigError
from pipeline.formatting import duration, rate, ratio, visible

if TYPE_CHECKING:
    from pipeline.cli.chat_model import ChatModel
    from pipeline.conversations.requests import TextStream
    from pipeline.conversations.row_builder import Chat
    from pipeline.decoding.acceptance import AcceptanceRule

ACCEPTED = "green"
LEGEND = (
    f"[{ACCEPTED}]Green[/] tokens are accepted guesses of the heads; the model's own token of a"
    " step is plain."
)


class Rule(StrEnum):
    """The acceptance rule above temperature 0."""

    REJECTION = "rejection"
    TYPICAL = "typical"


def chat(
    export_dir: Annotated[
        Path, typer.Argument(help="An export: RUN_DIR/latest/export, or a copy of it.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(help="Settings of the target as in a run, such as target.dtype=bfloat16."),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Decode without the heads, for comparison.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    rule: Annotated[
        Rule,
        typer.Option(
            help=(
                "Above temperature 0: rejection keeps the model's distribution; typical accepts"
                " more and changes it."
            )
        ),
    ] = Rule.REJECTION,
    seed: Annotated[
        int, typer.Option(help="Sampling seed; the text is the same with and without the heads.")
    ] = 0,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="The target as a directory or a Hub id. Default: the target named in the export."
        ),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs for the target. Default: one where there is one."),
    ] = None,
) -> None:
    """Chat with the target and its heads. Accepted guesses are green; each answer ends with its
    tokens per step.

    Ctrl-C ends an answer, Ctrl-D the chat. From a pipe each line is a question; answers go to
    stdout as plain text, their speed to stderr.

    Example: medusa-distill chat runs/demo/latest/export, and again with --plain.
    Example: medusa-distill chat EXPORT target.template_arguments.enable_thinking=false
    """
    from pipeline.cli.chat_model import load_chat_model
    from pipeline.config.load import target_settings
    from pipeline.decoding.acceptance import acceptance_rule

    try:
        system = utf8_text(system or "", "the system message")
    except RowRejected as rejected:
        raise ConfigError(rejected.detail, "--system", "Give it in UTF-8.") from None
    given = target_settings(settings or ())
    model = load_chat_model(
        export_dir, plain=plain, base_model=base_model, gpus=gpus, settings=given
    )
    chosen = acceptance_rule(rule.value, temperature)
    console = Console(highlight=False, soft_wrap=True)
    notes = console
    if not console.is_terminal:
        notes = Console(stderr=True, highlight=False, soft_wrap=True)
    if sys.stdin.isatty():
        notes.print(model.described, style="dim", markup=False)
        if not plain:
            notes.print(LEGEND)
        notes.print("Ctrl-C ends an answer, Ctrl-D the chat.")
    with model.at_full_speed():
        how = Answering(max_new_tokens, chosen, seed)
        chat_loop(model, model.new_chat(system, max_new_tokens), how, console, notes)


@dataclass(frozen=True)
class Answering:
    max_new_tokens: int
    rule: AcceptanceRule
    seed: int


def chat_loop(
    model: ChatModel, conversation: Chat, how: Answering, console: Console, notes: Console
) -> None:
    is_person = sys.stdin.isatty()
    for number, question in enumerate(questions(notes, is_person)):
        try:
            prompt, forgets = conversation.ask(question)
        except RowRejected as rejected:
            notes.print(f"This question cannot be asked: {rejected.detail}", markup=False)
            continue
        if forgets:
            notes.print("The context is full: earlier turns are forgotten.", style="yellow")
        steps = model.stream(prompt, how.max_new_tokens, how.rule, how.seed + number)
        with stop_on_interrupt(is_person) as stopped:
            ids, speed = write(steps, model.text_stream(), console, stopped)
        ended = bool(ids) and ids[-1] in model.decoder.eos_token_ids
        conversation.answered(ids, ended=ended)
        line = str(speed)
        if stopped() and not ended:
            line += " (stopped)"
        elif not ended:
            line += f" (cut after {len(ids)} tokens)"
        notes.print(line, style="dim", markup=False)


def questions(notes: Console, is_person: bool) -> Iterator[str]:
    """The questions, one per line, until the end of the input; Ctrl-C at the prompt clears the
    line.
    """
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    if not is_person:
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401 - arrow keys and history in input()

    while True:
        try:
            with interrupts_by(signal.default_int_handler):
                question = input("\n> ").strip()
        except EOFError:
            notes.print()
            return
        except KeyboardInterrupt:
            notes.print("\nCtrl-D ends the chat.", style="dim")
            continue
        if question:
            yield question


@dataclass
class AnswerSpeed:
    """The speed of one answer; the prefill gives the first token and is not a step."""

    started: float = field(default_factory=perf_counter)
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0
    num_steps: int = -1

    def step(self, num_tokens: int) -> None:
        """Count one forward (the first is the prefill) and its tokens."""
        self.last = perf_counter()
        self.first = self.first or self.last
        self.num_tokens, self.num_steps = self.num_tokens + num_tokens, self.num_steps + 1

    def __str__(self) -> str:
        said = [f"{self.num_tokens} token{'s' * (self.num_tokens != 1)}"]
        if self.num_steps > 0:
            later = self.num_tokens - 1
            said.append(f"{ratio(later / self.num_steps)} per step")
            said.append(f"{rate(later / max(self.last - self.first, 1e-9))} tokens/s")
        return ", ".join([*said, f"the first after {duration(self.first - self.started)}"])


def write(
    steps: Generator[list[int]], text: TextStream, console: Console, stopped: Callable[[], bool]
) -> tuple[list[int], AnswerSpeed]:
    """Print an answer as it is decoded; returns its ids and its speed."""
    ids: list[int] = []
    speed = AnswerSpeed()
    with closing(steps):  # also on early exit, so that the model's hook is removed
        for new_ids in steps:
            speed.step(len(new_ids))
            for place, token in enumerate(new_ids):
                style = ACCEPTED if place else None
                console.out(visible(text.push(token)), style=style, end="", highlight=False)
            ids += new_ids
            if stopped():
                break
    console.out(visible(text.flush()), highlight=False)
    return ids, speed


@contextmanager
def stop_on_interrupt(is_person: bool) -> Iterator[Callable[[], bool]]:
    """Yield whether Ctrl-C was pressed: it ends an answer, and with piped input the command."""
    pressed: list[int] = []
    if not is_person:
        yield lambda: False
        return
    with interrupts_by(lambda signum, _: pressed.append(signum)):
        yield lambda: bool(pressed)


@contextmanager
def interrupts_by(handler: Any) -> Iterator[None]:
    """Handle Ctrl-C by `handler` within the context."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
