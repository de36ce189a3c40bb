"""The command line `medusa-distill`, assembled from its commands."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pipeline.cli import chat, check, compare, inspect, keys, plan, push, run, serve, status, verify
from pipeline.cli.arguments import with_options_in_errors
from pipeline.cli.ending import ends_well
from pipeline.cli.version import print_version

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
    keys.keys,
):
    app.command()(command)
for without_configuration in (chat.chat, serve.serve, check.check, push.push):
    app.command()(with_options_in_errors(without_configuration))

COMMITTING = {"run", "push"}  # their results stay after an interrupt, and they can continue


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version)
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", help="With --version: also print the environment.", is_eager=True
        ),
    ] = False,
) -> None:
    """Train, check and publish draft heads for a chat model, by self-distillation."""


def main() -> None:
    """Run the command line `medusa-distill` and exit with its code."""
    commits = not COMMITTING.isdisjoint(sys.argv[1:2])
    sys.exit(ends_well(lambda: app(standalone_mode=False), commits=commits))
