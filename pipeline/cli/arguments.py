"""Command-line arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from pipeline.config.load import RUN_FILE
from pipeline.errors import ConfigError

LATEST_EXPORT = "latest/export"  # in a run's directory

RunArgument = Annotated[Path, Argument(help="A run's directory, such as runs/demo.")]
TargetSettings = Annotated[
    list[str] | None,
    Argument(help="target.KEY=VALUE as in a run, such as target.dtype=bfloat16."),
]
Gpus = Annotated[
    int | None,
    Option(min=0, help="GPUs for the target. Default: 1 if there is a GPU, else 0."),
]
ConfigArgument = Annotated[
    Path, Argument(help="A YAML file, a run's directory, or a bundled name such as qwen2.5-7b.")
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        help="section.key=value; values parse as YAML, paths are relative to the working directory."
    ),
]


def export_of(source: Path) -> Path:
    """Return the latest export of a run's directory, or the directory itself; see `run_of`."""
    run = run_of(source)
    return source if run is None else run / LATEST_EXPORT


def run_of(source: Path) -> Path | None:
    """Return the run of a run's directory or of its `latest/export`; None for other exports.

    Raises:
        ConfigError: There is no such directory, or the run has no export yet.
    """
    if not source.is_dir():
        fix = "Give a run's directory, or an export."
        raise ConfigError("There is no such directory.", source, fix)
    above = source.absolute().parent.parent
    for run, export in ((source, source / LATEST_EXPORT), (above, source)):
        latest = run / LATEST_EXPORT
        if latest.is_dir() and export.is_dir() and latest.samefile(export):
            return run
    if (source / RUN_FILE).is_file():
        fix = f"Continue it: medusa-distill run {source}"
        raise ConfigError("This run has no export yet.", source, fix)
    return None
