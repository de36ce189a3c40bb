"""`medusa-distill compare`: print the runs of a sweep side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.errors import ConfigError
from pipeline.formatting import visible
from pipeline.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipeline.report.comparison import ComparedRun

QUESTION_KEYS = {"prompts", "max_new_tokens", "max_tokens"}  # what a check asks


def compare(
    run_dirs: Annotated[
        list[Path], typer.Argument(help="Two or more run directories.", metavar="RUN_DIR...")
    ],
) -> None:
    """Compare runs: differing settings, rates with errors, speed, training time.

    Unfinished runs are shown as far as they are. Runs that were checked on other questions or
    machines are named.

    Example: medusa-distill compare runs/heads-4 runs/heads-5 runs/heads-6
    """
    from pipeline.report.comparison import compare_runs

    if len(run_dirs) < 2:
        raise ConfigError("One run is no comparison.", "compare", "Name two runs or more.")
    table, notes = compare_runs([compared_run(path) for path in run_dirs])
    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    grid = Table(box=None, header_style="bold")
    for name in table.columns:
        grid.add_column(visible_text(name))
    for row in table.rows:
        grid.add_row(*map(visible_text, row))
    console.print(grid)
    for note in notes:
        console.print(visible_text(f"! {note}"))


def visible_text(cell: str) -> Text:
    """Return a cell without markup and with its control characters shown."""
    return Text(visible(cell))


def compared_run(path: Path) -> ComparedRun:
    """Read the figures of one run from the records of its stages.

    Raises:
        ConfigError: This is no run directory.
    """
    from pipeline.artifacts.trained_heads import HEADS_FILE
    from pipeline.flow import statuses_of  # imports torch, and --help does not wait for it
    from pipeline.report.comparison import ComparedRun
    from pipeline.run.reporting import assemble_report

    run, config = RunDirectory.open(path)
    unfinished, done = [], {}
    for name, state in statuses_of(run, config).items():
        if state.directory and state.status in ("done", "failed"):
            done[name] = state.directory.done
        elif state.status != "skipped":
            unfinished.append(name)
    heads_bytes, questions = None, None
    trained, checked = done.get("train"), done.get("check")
    if trained and HEADS_FILE in trained.files:
        heads_bytes = trained.files[HEADS_FILE].size
    if checked:
        asked = config.check.model_dump(mode="json", include=QUESTION_KEYS)
        questions = json.dumps([asked, checked.upstream.get("generate")], sort_keys=True)
    return ComparedRun(
        path.name or str(path),
        # The link of an unfinished stage may lead to a result of another recipe.
        assemble_report(run, config, without=unfinished),
        config.model_dump(mode="json"),
        tuple(unfinished),
        heads_bytes,
        questions,
    )
