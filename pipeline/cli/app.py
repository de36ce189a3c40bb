"""The command line `medusa-distill`, assembled from its commands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import chat, check, compare, inspect, keys, plan, push, run, serve, status, verify
from pipeline.cli.arguments import with_options_in_errors
from pipeline.cli.ending import ends_well
from pipeline.cli.version import print_version
from pipeline.errors import ConfigError

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
GONE = {
    "archive": (
        "Copy the run directory with rclone, `aws s3 sync` or rsync, then `medusa-distill verify`"
        " the copy."
    ),
    "restore": "Copy the run directory back with the same tool, then `medusa-distill verify` it.",
}


def _refuse_removed_command(context: typer.Context) -> None:
    """Raise ConfigError for a removed command, with its replacement."""
    name = str(context.info_name)
    raise ConfigError(f"There is no command '{name}' any more.", name, GONE[name])


for gone in GONE:
    anything = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(gone, hidden=True, context_settings=anything)(_refuse_removed_command)


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version)
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Also print packages and hardware.", is_eager=True),
    ] = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run",
            exists=True,
            file_okay=False,
            resolve_path=True,
            help="Also print a run's fingerprints.",
            is_eager=True,
        ),
    ] = None,
) -> None:
    """Train, check and publish draft heads for a chat model, by self-distillation."""
    if verbose or run_dir:
        raise ConfigError(
            "--verbose and --run belong to --version.",
            "command line",
            "Write medusa-distill --version --verbose.",
        )


def main() -> None:
    """Run the command line `medusa-distill` and exit with its code."""
    commits = not COMMITTING.isdisjoint(sys.argv[1:2])
    sys.exit(ends_well(lambda: app(standalone_mode=False), commits=commits))
