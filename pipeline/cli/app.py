"""`medusa-distill`: the commands, and how every one of them ends.

An error for the user is one paragraph on stderr and its exit code; a signal ends cleanly with 130 or 143.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import typer
from rich.console import Console

from pipeline.cli import inspect, keys, plan, push, run, status, verify
from pipeline.errors import Interrupted, MedusaDistillError

app = typer.Typer(
    name="medusa-distill",
    help="A chat model in, verified Medusa heads out: distill, train, check in the serving engine, publish.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run.run, plan.plan, status.status, verify.verify, inspect.inspect, push.push, keys.keys):
    app.command()(command)


def main() -> None:
    """The console script."""
    sys.exit(ends_well(lambda: app(standalone_mode=False)))


def ends_well(story: Callable[[], Any]) -> int:
    """Run a command or a flow and return its exit code, with errors told as a person reads them."""
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    errors = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)

    def tell(what: str) -> None:
        errors.print("[red]error:[/] ", end="")
        errors.print(" ".join(what.split()), markup=False)  # whatever it quotes, one paragraph

    try:
        result = story()
        return result if isinstance(result, int) else 0
    except Interrupted as stop:
        errors.print(f"[yellow]stopped:[/] {stop}")
        return stop.exit_code
    except MedusaDistillError as error:
        tell(str(error))
        if os.environ.get("MEDUSA_DISTILL_TRACEBACK"):
            errors.print_exception()
        return error.exit_code
    except typer.TyperException as error:
        if said := error.format_message():  # without any words the help was shown
            tell(f"{said.rstrip('.')}. See --help.")
        return error.exit_code


def _stop(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)  # a second one is not polite any more
    raise Interrupted(signum, "Stopped.", "What was committed is kept; the same command continues.")
