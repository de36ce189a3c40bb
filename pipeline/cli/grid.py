"""A grid of text cells in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.formatting import visible

WIDTH = 160  # columns where the output is no terminal


def wide_console() -> Console:
    """Return a console of standard output that is 160 columns wide where it is no terminal."""
    width = None if Console().is_terminal else WIDTH
    return Console(width=width, highlight=False)


def print_grid(console: Console, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print the table of a command's output, without lines.

    Cells have no markup, and their control characters are shown as symbols.
    """
    table = Table(box=None, header_style="bold")
    for name in columns:
        table.add_column(Text(visible(name)))
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console.print(table)
