"""The report in a terminal, at most 100 columns wide.

Plain text without escape codes where the output is not a terminal. In texts from data neither
rich's markup nor control characters have an effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from pipeline.report.facts import Table, check_outcome, finite, headline, subtitle, title
from pipeline.report.tables import tables
from pipeline.report.warnings import warnings

_WIDTH = 100
_NAMES = 24
_COLOURS = {True: "green", False: "red", None: "yellow"}


def print_report(report: dict, console: Console, extras: dict | None = None) -> None:
    """Print the headline figures and the main tables, also of an incomplete report."""
    report, extras = finite(report), finite(extras or {})
    width = min(console.width, _WIDTH)

    def show(item: Grid | Text) -> None:
        console.print(item, width=width, highlight=False)

    outcome = check_outcome(report)
    show(_text(title(report), "bold"))
    if described := subtitle(report):
        show(_text(described, "dim"))
    show(_text(outcome.text, f"bold {_COLOURS[outcome.passed]}"))
    for notes, colour in ((outcome.failures, "red"), (warnings(report), "yellow")):
        for note in notes:
            show(_text(f"- {note}", colour))
    show(_text(""))
    show(_headline(report))
    parts = tables(report, extras)
    between = [
        name for name in parts if name not in ("check", "stages", "quarantine", "provenance")
    ]
    print_tables([parts[name] for name in ("stages", *between, "quarantine")], console)


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print tables, each after an empty line."""
    width = min(console.width, _WIDTH)
    for table in tables:
        console.print()
        if table.rows:
            heading, grid = _text(f"{table.title}  {table.note}".strip(), "bold"), _grid(table)
            console.print(heading, grid, sep="\n", width=width, highlight=False)
        else:
            console.print(
                _text(f"{table.title}: {table.empty}", "bold"), width=width, highlight=False
            )


def _headline(report: dict) -> Grid:
    grid = Grid(box=box.SIMPLE, show_header=False, pad_edge=False, show_edge=False)
    grid.add_column(style="bold")
    grid.add_column(justify="right", style="bold cyan", no_wrap=True)
    grid.add_column(style="dim")
    for figure in headline(report):
        grid.add_row(*map(_text, (figure.label, figure.value, figure.note)))
    return grid


def _grid(table: Table) -> Grid:
    grid = Grid(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    named = (
        max(len(row[0]) for row in (table.columns, *table.rows)) <= _NAMES
    )  # a short name is never broken
    for i, column in enumerate(table.columns):
        justify: Literal["left", "right"] = "left" if i in table.words else "right"
        grid.add_column(_text(column), justify=justify, overflow="fold", no_wrap=not i and named)
    for row in table.rows:
        grid.add_row(*map(_text, row))
    return grid


def _text(text: str, style: str = "") -> Text:
    return Text(
        "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text),
        style,
        overflow="fold",
    )
