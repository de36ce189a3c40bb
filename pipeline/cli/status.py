"""`medusa-distill status`: how far each stage is."""

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
    """Per stage: done, failed, partial, stale or not run, and why; rows, quarantined rows, seconds,
    tokens/s.
    """
    from pipeline.flow import statuses_of  # imports torch, and --help does not wait for it

    run, config = RunDirectory.open(run_dir)
    table = Table(*COLUMNS, box=None, header_style="bold")
    for name, state in statuses_of(run, config).items():
        shards = f"{state.made}/{'?' if state.expected is None else state.expected}"
        if state.directory is None or not (state.made or state.expected):
            shards = ""
        cells = []
        for key in ("rows", "quarantined", "seconds", "tokens_per_second"):
            cell = state.summary.get(key, "")
            if isinstance(cell, float):
                cell = f"{cell:,.1f}"
            cells.append(f"{cell:,}" if isinstance(cell, int) else cell)
        directory = state.directory.path.name if state.directory else ""
        why = "" if state.status == "not run" else state.why
        row = [name, state.status, shards, *cells, visible(directory), visible(why)]
        table.add_row(*map(Text, row))
    Console(width=None if Console().is_terminal else 160).print(table)
