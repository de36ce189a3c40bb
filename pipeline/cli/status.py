"""`medusa-distill status`: how far each stage is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipeline.states import stage_states
from pipeline.storage.run_directory import RunDirectory


def status(run_dir: Annotated[Path, typer.Argument(help="A run's directory, such as runs/demo.")]) -> None:
    """Per stage: done, partial, stale or not run; rows, quarantined rows, seconds, tokens per second."""
    run, config = RunDirectory.open(run_dir)
    table = Table(
        "stage",
        "state",
        "shards",
        "rows",
        "quarantined",
        "seconds",
        "tokens/s",
        "directory",
        box=None,
        header_style="bold",
    )
    for name, state in stage_states(run, config).items():
        summary = state.directory.summary if state.directory else {}
        cells = [summary.get(key) for key in ("rows", "quarantined", "seconds", "tokens_per_second")]
        table.add_row(
            name,
            state.word,
            state.shards,
            *("" if cell is None else f"{cell:,.0f}" if isinstance(cell, int) else f"{cell:,.1f}" for cell in cells),
            state.directory.path.name if state.directory else "",
        )
    Console(width=None if Console().is_terminal else 120).print(table)
