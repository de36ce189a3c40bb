"""`medusa-distill compare`: print the runs of a sweep side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.text import Text
from typer import Argument

from pipeline.errors import ConfigError
from pipeline.formatting import visible
from pipeline.report.text_table import print_grid, wide_console
from pipeline.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipeline.report.comparison import ComparedRun

QUESTION_KEYS = {"prompts", "max_new_tokens", "max_tokens"}  # what a check asks


def compare(
    run_dirs: Annotated[
        list[Path], Argument(help="Two or more run directories.", metavar="RUN_DIR...")
    ],
) -> None:
    """Compare runs: differing settings, rates with errors, speed, training time.

    Unfinished runs are shown with the results that they have. Notes report runs that were checked
    on different questions or machines.

    Example: medusa-distill compare runs/heads-4 runs/heads-5 runs/heads-6
    """
    from pipeline.report.comparison import compare_runs

    if len(run_dirs) < 2:
        raise ConfigError("`compare` needs at least two runs.", "compare", "Pass two directories.")
    table, notes = compare_runs([compared_run(path) for path in run_dirs])
    console = wide_console()
    print_grid(console, table.columns, table.rows)
    for note in notes:
        console.print(Text(visible(f"! {note}")))


def compared_run(path: Path) -> ComparedRun:
    """Read the settings and figures of one run for the command `compare`.

    Raises:
        ConfigError: The directory is not a run directory, or its run.yaml is wrong.
    """
    from pipeline.flow import statuses_of  # imports torch, and --help does not wait for it
    from pipeline.report.comparison import ComparedRun
    from pipeline.run.reporting import assemble_report
    from pipeline.run.stage_status import FINISHED

    run, config = RunDirectory.open(path)
    states = statuses_of(run, config)
    unfinished = [name for name, state in states.items() if state.status not in FINISHED]
    questions = None
    checked = states.get("check")
    if checked and checked.directory and checked.status in FINISHED and checked.directory.done:
        asked = config.check.model_dump(mode="json", include=QUESTION_KEYS)
        generated = checked.directory.done.upstream.get("generate")
        questions = json.dumps([asked, generated], sort_keys=True)
    return ComparedRun(
        run.path.name,
        # The link of an unfinished stage may lead to a result of another recipe.
        assemble_report(run, config, without=unfinished),
        config.model_dump(mode="json"),
        unfinished,
        questions,
    )
