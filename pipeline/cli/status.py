"""`medusa-distill status`: print the state of each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.formatting import visible
from pipeline.storage.run_directory import RunDirectory

COLUMNS = (
    "stage",
    "state",
    "shards",
    "rows",
    "quarantined",
    "seconds",
    "tokens/s",
    "directory",
    "why",
)


def status(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, such as runs/demo.")],
) -> None:
    """Print the state of each stage and why, rows, quarantined rows, seconds and tokens/s."""
    from pipeline.flow import statuses_of  # imports torch, and --help does not wait for it

    run, config = RunDirectory.open(run_dir)
    table = Table(*COLUMNS, box=None, header_style="bold")
    for name, state in statuses_of(run, config).items():
        directory, shards, why = "", "", ""
        if state.directory:
            directory = state.directory.path.name
            if state.made or state.expected:
                shards = f"{state.made}/{state.expected}"
        if state.status != "not run":
            why = state.why
        cells = [name, state.status, shards]
        for key in ("rows", "quarantined", "seconds", "tokens_per_second"):
            figure = state.summary.get(key, "")
            if isinstance(figure, float):
                figure = round(figure, 1)
            cells.append(f"{figure:,}" if figure != "" else "")
        table.add_row(*(Text(visible(cell)) for cell in [*cells, directory, why]))
    Console(width=None if Console().is_terminal else 160).print(table)
