"""report.md: the report's facts as Markdown that reads well in a repository or as an issue comment."""

from __future__ import annotations

import re

from pipeline.report.facts import Table, headline, subtitle, title, verdict, warnings
from pipeline.report.tables import tables


def markdown(report: dict, extras: dict) -> str:
    """The whole report.md; texts that come from data are escaped, so that they show as they are."""
    outcome = verdict(report)
    lines = [
        f"# {_escaped(title(report))}",
        "",
        _escaped(subtitle(report)),
        "",
        f"**{outcome.text.capitalize()}.**",
        "",
    ]
    if outcome.failures:
        lines += [*(f"- {_escaped(failure)}" for failure in outcome.failures), ""]
    if found := warnings(report):
        lines += [*(f"- {_escaped(warning)}" for warning in found), ""]
    figures = tuple((figure.label, figure.value, figure.note) for figure in headline(report))
    parts = [Table("Headline", ("figure", "value", "meaning"), figures, words=(0, 2)), *tables(report, extras).values()]
    return "\n".join(lines) + "\n" + "\n\n".join(map(_section, parts)) + "\n"


def _section(table: Table) -> str:
    body = [f"{_escaped(table.note)}\n"] if table.note and table.rows else []
    if table.rows:
        rule = ["---" if i in table.words else "---:" for i in range(len(table.columns))]
        body += [_row(table.columns), f"| {' | '.join(rule)} |", *map(_row, table.rows)]
    else:
        body = [f"{table.empty.capitalize()}."]
    return "\n".join([f"## {table.title}\n", *body])


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    """Text as Markdown shows it: on one line, every character that could mean something preceded by a backslash."""
    return re.sub(r"([\\`*_\[\]<>|~&#])", r"\\\1", " ".join(text.split()))
