"""`medusa-distill status`: how far each stage is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.formatting import visible
from pipeline.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipeline.run.stage_status import StageStatus


def status(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, such as runs/demo.")],
) -> None:
    """Per stage: done, failed, partial, stale or not run, and why; rows, quarantined rows, seconds,
    tokens/s.
    """
    from pipeline.flow import statuses_of  # imports torch, and --help does not wait for it

    run, config = RunDirectory.open(run_dir)
    headers = (
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
    table = Table(*headers, box=None, header_style="bold")
    for name, state in statuses_of(run, config).items():
        summary = state.summary
        cells = [
            summary.get(key) for key in ("rows", "quarantined", "seconds", "tokens_per_second")
        ]
        table.add_row(
            name,
            state.status,
            shards_in_words(state),
            *(
                "" if cell is None else f"{cell:,.0f}" if isinstance(cell, int) else f"{cell:,.1f}"
                for cell in cells
            ),
            Text(visible(state.directory.path.name) if state.directory else ""),
            Text("" if state.status == "not run" else visible(state.why)),
        )
    Console(width=None if Console().is_terminal else 160).print(table)


def shards_in_words(state: StageStatus) -> str:
    if state.directory is None or not (state.made or state.expected):
        return ""
    return f"{state.made}/{'?' if state.expected is None else state.expected}"
