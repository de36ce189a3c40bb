"""`medusa-distill`: the commands, their error messages and exit codes.

A user's error is one paragraph on stderr and an exit code; a signal exits with 130 or 143.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from pipeline.cli import chat, inspect, keys, plan, push, run, status, verify
from pipeline.errors import Interrupted, MedusaDistillError
from pipeline.redact import keep_out_of_logs, redacted
from pipeline.report.formatting import visible

app = typer.Typer(
    name="medusa-distill",
    help="A chat model in, verified Medusa heads out: distill, train, check in the serving engine, publish.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run.run, plan.plan, status.status, verify.verify, inspect.inspect, chat.chat, push.push, keys.keys):
    app.command()(command)


def main() -> None:
    sys.exit(ends_well(lambda: app(standalone_mode=False)))


def ends_well(story: Callable[[], Any]) -> int:
    """Run a command or a flow, print errors as readable paragraphs, and return the exit code."""
    console = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    stops: list[Interrupted] = []
    keep_out_of_logs()

    def stop(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)  # a second signal ends the process at once
        stops.append(Interrupted(signum, "Stopped.", "What was committed is kept; the same command continues."))
        raise KeyboardInterrupt  # while Ray waits it lets no other exception through

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    try:
        result = story()
    except (Exception, KeyboardInterrupt) as error:
        return _print_error(stops[0] if stops else error, console)
    if stops:  # also where a caller handled the interrupt
        return _print_error(stops[0], console)
    return result if isinstance(result, int) else 0


def _print_error(error: BaseException, console: Console) -> int:
    """Print an error as one paragraph and return its exit code; an unexpected error is raised."""
    if isinstance(error, typer.TyperException):
        said, code = f"{error.format_message().rstrip('.')}. See --help.", error.exit_code
        if not error.format_message():  # no command was given; the help was printed
            return code
    elif isinstance(error, MedusaDistillError):
        said, code = str(error), error.exit_code
    else:
        raise error
    console.print("[yellow]stopped:[/] " if isinstance(error, Interrupted) else "[red]error:[/] ", end="")
    console.print(visible(" ".join(redacted(said).split())), markup=False)  # one paragraph, whatever it quotes
    if os.environ.get("MEDUSA_DISTILL_TRACEBACK"):
        console.print(visible(redacted("".join(traceback.format_exception(error)))), markup=False)
    return code
