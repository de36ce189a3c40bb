"""Rendering of a run's report as report.json, report.md, report.html, and in a terminal.

report.html is self-contained, for desktop and phone, light and dark. Its Content-Security-Policy
forbids loading files and running scripts. The template escapes all text; only the style sheet is
inserted as markup.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup
from rich.console import Console
from rich.text import Text

from pipeline.artifacts.check_result import Sample
from pipeline.artifacts.json_form import to_json
from pipeline.formatting import ratio
from pipeline.report.check_tables import (
    categories_table,
    check_table,
    load_study_table,
    methods_table,
    served_model_table,
)
from pipeline.report.facts import (
    Outcome,
    check_outcome,
    report_subtitle,
    report_title,
    speed_outcomes,
)
from pipeline.report.report import Report
from pipeline.report.tables import (
    chain_table,
    drift_table,
    heads_table,
    provenance_table,
    quarantine_table,
    sizes_table,
    stages_table,
)
from pipeline.report.text_table import Table, escaped, markdown_section, print_tables, print_text
from pipeline.report.warnings import report_warnings
from pipeline.report.what_to_serve import what_to_serve_table

TEMPLATES = Path(__file__).parent
PAGES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(TEMPLATES),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
PAGES.filters.update(ratio=ratio)
COLOURS = {True: "bold green", False: "bold red", None: "bold yellow"}


def report_texts(report: Report, samples: Sequence[Sample]) -> dict[str, str]:
    """Render report.json, report.md and report.html; return their contents by file name."""
    content = json.dumps(to_json(report), indent=2, ensure_ascii=False, allow_nan=False)
    return {
        "report.json": content + "\n",
        "report.md": render_markdown(report),
        "report.html": render_html(report, samples),
    }


def report_tables(report: Report) -> dict[str, Table]:
    """Return a report's tables by name, in reading order.

    Tables of optional measurements are left out if they have no rows.
    """
    tables = {
        "serve": what_to_serve_table(report),
        "check": check_table(report),
        "methods": methods_table(report),
        "heads": heads_table(report),
        "sizes": sizes_table(report),
        "chain": chain_table(report),
    }
    optional = {
        "categories": categories_table(report),
        "served_model": served_model_table(report),
        "drift": drift_table(report),
        "study_load": load_study_table(report),
    }
    tables.update({name: table for name, table in optional.items() if table.rows})
    tables["stages"] = stages_table(report)
    tables["quarantine"] = quarantine_table(report)
    tables["provenance"] = provenance_table(report)
    return tables


def report_outcomes(report: Report) -> list[Outcome]:
    """Return a report's verdicts: of the check, which is about exactness, and on the speed."""
    return [check_outcome(report), *speed_outcomes(report)]


def render_markdown(report: Report) -> str:
    """Render report.md; text from data is escaped."""
    outcomes = report_outcomes(report)
    parts = [f"# {escaped(report_title(report))}", escaped(report_subtitle(report))]
    notes: list[str] = []
    for outcome in outcomes:
        parts.append(f"**{outcome.text}.**")
        notes += outcome.failures
    notes += report_warnings(report)
    if notes:
        parts.append("\n".join(f"- {escaped(note)}" for note in notes))
    tables = report_tables(report)
    if not tables["serve"].rows:
        del tables["serve"]
    parts += map(markdown_section, tables.values())
    return "\n\n".join(parts) + "\n"


def render_html(report: Report, samples: Sequence[Sample]) -> str:
    """Render report.html; the same report gives the same bytes."""
    return PAGES.get_template("page.html").render(
        title=report_title(report),
        subtitle=report_subtitle(report),
        outcomes=report_outcomes(report),
        warnings=report_warnings(report),
        tables=report_tables(report),
        samples=samples,
        css=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
    )


def print_report(report: Report, console: Console, directory: Path) -> None:
    """Print the figures of a report that matter most, and where the others are.

    The output is at most 100 columns wide, and has escape codes only in a terminal.

    Args:
        directory: The run's directory, with report.html.
    """
    print_text(report_title(report), console, "bold")
    print_text(report_subtitle(report), console, "dim")
    for outcome in report_outcomes(report):
        print_text(outcome.text, console, COLOURS[outcome.is_good])
        for failure in outcome.failures:
            print_text(f"- {failure}", console, "red")
    for warning in report_warnings(report):
        print_text(f"- {warning}", console, "yellow")
    serve = what_to_serve_table(report)
    for point in serve.points:
        print_text(point, console, "")
    for command in serve.commands:
        whole = Text(f"  {command.replace('RUN_DIR', shlex.quote(str(directory)))}", "dim")
        console.print(whole, soft_wrap=True, highlight=False)
    tables = [check_table(report), stages_table(report)]
    quarantine = quarantine_table(report)
    if quarantine.rows:
        tables.append(quarantine)
    print_tables(tables, console)
    console.print()
    print_text(f"All tables: {directory / 'report.html'}", console, "bold")
