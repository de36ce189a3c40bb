"""A run's report as texts: report.json for programs, report.md and report.html for people.

`report` is the dictionary that report.json shows; `extras` is data for the drawings only: `tree`
{"choices", "node_shares"}, `losses` and `held_out` (rows of {"step", "loss", "head_losses"}),
`samples` ({"prompt", "tokens": [{"text", "step"}]}). Every part of both is optional. Nothing is
read or written here.
"""

from __future__ import annotations

import json

from pipeline.formatting import escaped
from pipeline.report.facts import Table, check_outcome, finite, headline, in_order, subtitle, title
from pipeline.report.tables import tables
from pipeline.report.warnings import warnings


def report_texts(report: dict, extras: dict) -> dict[str, str]:
    """The contents of report.json, report.md and report.html by name; a number that is not finite
    is null.
    """
    from pipeline.report.html import page  # slow to import: matplotlib

    report, extras = in_order(finite(report)), finite(extras)
    return {
        "report.json": json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "report.md": markdown(report, extras),
        "report.html": page(report, extras),
    }


def markdown(report: dict, extras: dict) -> str:
    """report.md; text from data is escaped."""
    outcome = check_outcome(report)
    lines = [
        f"# {escaped(title(report))}",
        "",
        escaped(subtitle(report)),
        "",
        f"**{outcome.text.capitalize()}.**",
        "",
    ]
    for notes in filter(None, (outcome.failures, warnings(report))):
        lines += [*(f"- {escaped(note)}" for note in notes), ""]
    figures = tuple((figure.label, figure.value, figure.note) for figure in headline(report))
    parts = [
        Table("Headline", ("figure", "value", "meaning"), figures, words=(0, 2)),
        *tables(report, extras).values(),
    ]
    return "\n".join(lines) + "\n" + "\n\n".join(map(section, parts)) + "\n"


def section(table: Table) -> str:
    """A table under its title, as Markdown."""
    body = [f"{escaped(table.note)}\n"] if table.note and table.rows else []
    if table.rows:
        rule = ["---" if i in table.words else "---:" for i in range(len(table.columns))]
        body += [_row(table.columns), f"| {' | '.join(rule)} |", *map(_row, table.rows)]
    else:
        body = [f"{table.empty.capitalize()}."]
    return "\n".join([f"## {table.title}\n", *body])


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(map(escaped, cells))} |"
