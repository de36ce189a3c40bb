"""A run's report as report.json, report.md, report.html, and in a terminal.

report.html is self-contained, for desktop and phone, light and dark: it loads nothing and runs no
script, which its security policy forbids. The template escapes all text; only our own drawings and
the style sheet are markup. In a terminal neither rich's markup nor control characters in texts from
data have an effect.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import jinja2
from markupsafe import Markup
from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from pipeline.artifacts.json_form import to_json
from pipeline.formatting import count, escaped, rate, ratio, times
from pipeline.report.check_tables import (
    categories_table,
    check_table,
    exact_match_table,
    methods_table,
    served_model_table,
    study_tables,
)
from pipeline.report.facts import check_outcome, headline, subtitle, title, warnings
from pipeline.report.report import Extras, Report
from pipeline.report.tables import (
    Table,
    chain_table,
    drift_table,
    heads_table,
    provenance_table,
    quarantine_table,
    sizes_table,
    skipped_files_table,
    stages_table,
    tree_table,
)

TEMPLATES = Path(__file__).parent
WIDTH = 100  # columns of a terminal
SHORT_NAME = 24  # characters of a first column that is never broken
COLOURS = {True: "green", False: "red", None: "yellow"}


def report_texts(report: Report, extras: Extras) -> dict[str, str]:
    """The contents of report.json, report.md and report.html, by name."""
    content = json.dumps(to_json(report), indent=2, ensure_ascii=False, allow_nan=False)
    return {
        "report.json": content + "\n",
        "report.md": markdown(report, extras),
        "report.html": page(report, extras),
    }


def all_tables(report: Report, extras: Extras) -> dict[str, Table]:
    """All tables by name, in reading order: results first, then how they were made."""
    tables = {
        "check": check_table(report),
        "methods": methods_table(report),
        "heads": heads_table(report),
        "tree": tree_table(report, extras.calibration),
        "sizes": sizes_table(report.tree),
        "chain": chain_table(report.tree),
    }
    optional = {
        "categories": categories_table(report),
        "exact_match": exact_match_table(report),
        "served_model": served_model_table(report),
        "drift": drift_table(report),
        "skipped": skipped_files_table(report),
        **study_tables(report),
    }
    for name, table in optional.items():
        if table.rows:
            tables[name] = table
    tables["stages"] = stages_table(report)
    tables["quarantine"] = quarantine_table(report)
    tables["provenance"] = provenance_table(report)
    return tables


# --- Markdown


def markdown(report: Report, extras: Extras) -> str:
    """report.md; text from data is escaped."""
    outcome = check_outcome(report)
    lines = [f"# {escaped(title(report))}", "", escaped(subtitle(report)), ""]
    lines += [f"**{outcome.text.capitalize()}.**", ""]
    for notes in (outcome.failures, warnings(report)):
        if notes:
            lines += [*(f"- {escaped(note)}" for note in notes), ""]
    figures = Table("Headline", ["figure", "value", "meaning"], words=(0, 2))
    for figure in headline(report):
        figures.add(figure.label, figure.value, figure.note)
    sections = [section(table) for table in (figures, *all_tables(report, extras).values())]
    return "\n".join(lines) + "\n" + "\n\n".join(sections) + "\n"


def section(table: Table) -> str:
    """A table under its title, as Markdown."""
    lines = [f"## {table.title}\n"]
    if not table.rows:
        lines.append(f"{table.empty.capitalize()}.")
        return "\n".join(lines)
    if table.note:
        lines.append(f"{escaped(table.note)}\n")
    return "\n".join([*lines, grid(table)])


def grid(table: Table) -> str:
    """A table alone, as Markdown."""
    rule = ["---" if i in table.words else "---:" for i in range(len(table.columns))]
    lines = [_line(table.columns), f"| {' | '.join(rule)} |", *map(_line, table.rows)]
    return "\n".join(lines)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"


# --- HTML


def page(report: Report, extras: Extras) -> str:
    """report.html; the same report gives the same bytes."""
    from pipeline.report.plots import drawings  # imports matplotlib, which is slow

    return _template().render(
        native=report.native,
        title=title(report),
        subtitle=subtitle(report),
        outcome=check_outcome(report),
        warnings=warnings(report),
        figures=headline(report),
        tables=all_tables(report, extras),
        plots={name: Markup(drawing) for name, drawing in drawings(report, extras).items()},
        samples=extras.samples,
        css=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(rate=rate, times=times, ratio=ratio, count_of=count)
    return environment.get_template("page.html")


# --- terminal


def print_report(report: Report, console: Console, extras: Extras) -> None:
    """Print the headline figures and the main tables, also of an incomplete report.

    At most 100 columns wide; plain text without escape codes where the output is no terminal.
    """
    outcome = check_outcome(report)
    colour = COLOURS[outcome.passed]
    lines = [_text(title(report), "bold"), _text(subtitle(report), "dim")]
    lines.append(_text(outcome.text, f"bold {colour}"))
    lines += [_text(f"- {failure}", "red") for failure in outcome.failures]
    lines += [_text(f"- {warning}", "yellow") for warning in warnings(report)]
    figures = Grid(box=box.SIMPLE, show_header=False, pad_edge=False, show_edge=False)
    figures.add_column(style="bold")
    figures.add_column(justify="right", style="bold cyan", no_wrap=True)
    figures.add_column(style="dim")
    for figure in headline(report):
        figures.add_row(_text(figure.label), _text(figure.value), _text(figure.note))
    for item in (*(line for line in lines if line), Text(), figures):
        console.print(item, width=min(console.width, WIDTH), highlight=False)
    tables = all_tables(report, extras)
    stages, quarantine = tables.pop("stages"), tables.pop("quarantine")
    del tables["check"], tables["provenance"]
    print_tables([stages, *tables.values(), quarantine], console)


def print_tables(tables: Iterable[Table], console: Console) -> None:
    """Print tables, each after an empty line."""
    width = min(console.width, WIDTH)
    for table in tables:
        console.print()
        if not table.rows:
            empty = _text(f"{table.title}: {table.empty}", "bold")
            console.print(empty, width=width, highlight=False)
            continue
        heading = _text(f"{table.title}  {table.note}".strip(), "bold")
        console.print(heading, _rich_grid(table), sep="\n", width=width, highlight=False)


def _rich_grid(table: Table) -> Grid:
    rich_grid = Grid(box=box.SIMPLE, pad_edge=False, show_edge=False, collapse_padding=True)
    longest = max(len(row[0]) for row in (table.columns, *table.rows))
    for i, column in enumerate(table.columns):
        justify: Literal["left", "right"] = "left" if i in table.words else "right"
        no_wrap = i == 0 and longest <= SHORT_NAME
        rich_grid.add_column(_text(column), justify=justify, overflow="fold", no_wrap=no_wrap)
    for row in table.rows:
        rich_grid.add_row(*map(_text, row))
    return rich_grid


def _text(text: str, style: str = "") -> Text:
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return Text(shown, style, overflow="fold")
