"""`medusa-distill status`: print the state of each stage."""

from __future__ import annotations

from pipeline.cli.arguments import RunArgument
from pipeline.report.text_table import print_grid, wide_console
from pipeline.storage.run_directory import RunDirectory

COLUMNS = (
    "stage",
    "state",
    "shards",
    "rows",
    "quarantined",
    "seconds",
    "per second",
    "directory",
    "why",
)


def status(run_dir: RunArgument) -> None:
    """Print each stage's state and the reason, rows, quarantined rows, seconds and rates.

    Rates are in tokens per second, for train in positions per second.
    """
    from pipeline.flow import statuses_of  # imports torch, and --help does not wait for it

    rows = []
    for name, state in statuses_of(*RunDirectory.open(run_dir)).items():
        directory, shards, why = "", "", ""
        if state.directory:
            directory = state.directory.path.name
            if state.made or state.expected:
                shards = f"{state.made}/{state.expected}"
        if state.status != "not run":
            why = state.why
        cells = [name, state.status, shards]
        for key in ("rows", "quarantined", "seconds", "tokens_per_second"):
            figure = state.summary.get(key, "")
            if isinstance(figure, float):
                figure = round(figure, 1)
            cells.append(f"{figure:,}" if figure != "" else "")
        rows.append([*cells, directory, why])
    print_grid(wide_console(), COLUMNS, rows)
