"""`medusa-distill archive` and `medusa-distill restore`: a run to an object store, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from rich.console import Console

from pipeline.archive.places import open_place
from pipeline.archive.restoring import restore_run
from pipeline.archive.storing import Show, Stored, store_run
from pipeline.execution.progress import Meter, print_stage
from pipeline.storage.run_directory import RunDirectory

Work: TypeAlias = Callable[[Show], Stored]
Address = Annotated[
    str, typer.Argument(help="A folder of its own: s3://BUCKET/PATH, gs://…, abfs://…, file://…, or a path.")
]


def archive(run_dir: Annotated[Path, typer.Argument(help="A run's directory.")], address: Address) -> None:
    """Copy a run to an object store or another disk, every file compared by sha256; again, and only what is new goes.

    Example: medusa-distill archive runs/my-7b s3://my-bucket/runs/my-7b
    """
    from pipeline.flow import STAGES  # torch and transformers: --help does not wait for them

    run, _ = RunDirectory.open(run_dir)
    place = open_place(address)
    stages = {name: stage.to_resume for name, stage in STAGES.items()}
    _report("archive", "sent", lambda show: store_run(run, place, show, stages))


def restore(address: Address, run_dir: Annotated[Path, typer.Argument(help="A new directory for the run.")]) -> None:
    """Copy an archived run back, every file compared by sha256; nothing is overwritten.

    Example: medusa-distill restore s3://my-bucket/runs/my-7b runs/my-7b
    """
    place = open_place(address)
    _report("restore", "fetched", lambda show: restore_run(place, run_dir, show))


def _report(name: str, verb: str, work: Work) -> None:
    console = Console(highlight=False)
    with Meter(console, name, 0, unit="files") as meter:

        def show(done: int, total: int, num_bytes: int) -> None:
            meter.total = total
            meter.update(done, f"{num_bytes / 1e6:,.1f} MB {verb}")

        stored = work(show)
    some = f"{stored.num_sent} of them {verb}, every sum of these right; the others were there"
    new = some if stored.num_sent < stored.num_files else f"{verb}, every sum right"
    print_stage(
        console,
        "[green]✓[/]",
        name,
        f"{stored.num_files} files, {stored.num_bytes / 1e6:,.1f} MB, {new}",
    )
