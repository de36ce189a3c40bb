"""`medusa-distill --version`: print the version; with --verbose, what a report of a problem needs.

The verbose output has no color and no table, so that it can be pasted into an issue.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path

from typer import Context, Exit

PACKAGE = "medusa-distill"


def print_version(context: Context, asked: bool) -> None:
    """Print the version and exit, for the option `--version`.

    With `--verbose`, also print the environment, and with `--run` a run's fingerprints.
    """
    if not asked:
        return
    print(PACKAGE, version(PACKAGE))
    if context.params["verbose"]:
        _print_environment()
    if context.params["run_dir"]:
        _print_fingerprints(context.params["run_dir"])
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


def _print_fingerprints(run_dir: Path) -> None:
    """Print the names of a run's stage directories, which end with their fingerprints.

    run.yaml is not read, since it may be what the problem is.
    """
    from pipeline.storage.run_directory import RunDirectory

    print("run", run_dir.name)
    for stage in RunDirectory(run_dir).stages().values():
        print(stage.path.name)
