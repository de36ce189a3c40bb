"""Text tables: of reports, as Markdown and in a terminal, and of the commands' output.

In a terminal, rich markup and control characters in text from data have no effect.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from pipeline.formatting import UNKNOWN, visible

NOT_RUN = "not run"
MAX_WIDTH = 100  # columns of a terminal
GRID_WIDTH = 160  # columns of a command's output where that is no terminal
SHORT_NAME = 24  # longest first column, in characters, that is never wrapped


@dataclass
class Table:
    """A table of a report; `empty` is shown instead of a table without rows."""

    title: str
    columns: list[str]
    note: str = ""
    empty: str = NOT_RUN
    words: tuple[int, ...] = (0,)  # text columns; the others are numbers, aligned to the right
    rows: list[tuple[str, ...]] = field(default_factory=list)
    points: list[str] = field(default_factory=list)  # a list beside the note
    commands: list[str] = field(default_factory=list)  # shown below the table, to be copied

    def add(self, *cells: str) -> None:
        """Add a row to the table."""
        self.rows.append(cells)

    def add_known(self, label: str, *cells: str) -> None:
        """Add a row of a label and cells to the table, unless all cells are unknown (`-`)."""
        if any(cell != UNKNOWN for cell in cells):
            self.rows.append((label, *cells))


def markdown_section(table: Table) -> str:
    """Render a table as a section of report.md, with title and note.

    Without rows, the section is `table.empty`.
    """
    heading = f"## {table.title}\n\n"
    if not table.rows:
        return f"{heading}{table.empty.capitalize()}."
    if table.points:
        heading += "\n".join(f"- {escaped(point)}" for point in table.points) + "\n\n"
    if table.note:
        heading += f"{escaped(table.note)}\n\n"
    section = heading + markdown_table(table)
    if table.commands:
        section += "\n\n```bash\n" + "\n".join(table.commands) + "\n```"
    return section


def markdown_table(table: Table) -> str:
    """Render a table as Markdown, without title and note."""
    rule = ["---" if i in table.words else "---:" for i in range(len(table.columns))]
    lines = [
        _markdown_row(table.columns),
        f"| {' | '.join(rule)} |",
        *map(_markdown_row, table.rows),
    ]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Escape a text's Markdown characters; line breaks and repeated spaces become one space."""
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", " ".join(text.split()))


def _markdown_row(cells: Iterable[str]) -> str:
    """Format a row of a table in Markdown."""
    return f"| {' | '.join(map(escaped, cells))} |"


def print_text(text: str, console: Console, style: str) -> None:
    """Print a text in a terminal, at most 100 columns wide; rich markup has no effect."""
    shown = _rich_text(text, style)
    console.print(shown, width=min(console.width, MAX_WIDTH), highlight=False)


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print tables in a terminal with title and note; of an empty table, why it is empty."""
    for table in tables:
        console.print()
        if not table.rows:
            print_text(f"{table.title}: {table.empty}", console, "bold")
            continue
        print_text(f"{table.title}  {table.note}".strip(), console, "bold")
        for point in table.points:
            print_text(f"- {point}", console, "")
        width = min(console.width, MAX_WIDTH)
        console.print(_rich_table(table), width=width, highlight=False)


def _rich_table(table: Table) -> RichTable:
    """Convert a table to a rich table for a terminal."""
    columns = RichTable(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    longest = max(len(row[0]) for row in (table.columns, *table.rows))
    for i, name in enumerate(table.columns):
        columns.add_column(_rich_text(name), overflow="fold", justify="right")
        if i in table.words:
            columns.columns[i].justify = "left"
    columns.columns[0].no_wrap = longest <= SHORT_NAME
    for row in table.rows:
        columns.add_row(*map(_rich_text, row))
    return columns


def _rich_text(text: str, style: str = "") -> Text:
    """Convert a text to a rich `Text` without markup, and replace unprintable characters."""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return Text(shown, style, overflow="fold")


def wide_console() -> Console:
    """Return a console for the wide tables that commands print.

    It is 160 columns wide if standard output is not a terminal.
    """
    width = None if Console().is_terminal else GRID_WIDTH
    return Console(width=width, highlight=False)


def print_grid(console: Console, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a text table without lines; `columns` are its headings.

    Markup in cells has no effect, and control characters are shown as symbols.
    """
    table = RichTable(box=None, header_style="bold")
    for name in columns:
        table.add_column(Text(visible(name)))
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    console.print(table)
