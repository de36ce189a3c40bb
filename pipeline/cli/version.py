"""`medusa-distill --version`: print the version; with --verbose, what a report of a problem needs.

The verbose output has no color and no table, so that it can be pasted into an issue.
"""

from __future__ import annotations

import platform
from importlib.metadata import version

from typer import Context, Exit

PACKAGE = "medusa-distill"


def print_version(context: Context, asked: bool) -> None:
    """Print the version and exit, for the option `--version`.

    With `--verbose`, also print the environment.
    """
    if not asked:
        return
    print(PACKAGE, version(PACKAGE))
    if context.params["verbose"]:
        _print_environment()
    raise Exit


def _print_environment() -> None:
    """Print the versions of Python and packages, then the hardware, which imports torch."""
    from pipeline.execution.machine import hardware, versions

    for name, number in versions().items():
        if name != PACKAGE:
            print(name, number)
    print("platform:", platform.platform())
    for name, value in hardware().items():
        print(f"{name}: {value}")
