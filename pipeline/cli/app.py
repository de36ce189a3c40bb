"""`medusa-distill`: the commands."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from pipeline.cli import chat, check, compare, inspect, keys, plan, push, run, status, verify
from pipeline.cli.ending import ends_well

app = typer.Typer(
    name="medusa-distill",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    run.run,
    plan.plan,
    status.status,
    verify.verify,
    inspect.inspect,
    compare.compare,
    chat.chat,
    check.check,
    push.push,
    keys.keys,
):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"medusa-distill {version('medusa-distill')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """A chat model in, verified heads out: distill, train, check in the serving engine, publish."""


def main() -> None:
    sys.exit(ends_well(lambda: app(standalone_mode=False)))
