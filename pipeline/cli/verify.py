"""`medusa-distill verify`: every file of a run against its receipt."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Annotated

import typer
from rich.console import Console

from pipeline.errors import CheckFailed, ConfigError
from pipeline.execution.progress import print_stage
from pipeline.storage.run_directory import RunDirectory


def verify(
    run_dir: Annotated[Path, typer.Argument(help="A run's directory, such as runs/demo.")],
) -> None:
    """Compare every shard's and weight file's size and sha256 with DONE.json; exit 1 names what is
    damaged.

    Also checks that no question opens conversations of two splits.
    """
    from pipeline.artifacts.seed_rows import questions_in_two_splits
    from pipeline.flow import STAGES  # torch and transformers: --help does not wait for them

    run, _ = RunDirectory.open(run_dir)
    console = Console(highlight=False)
    damaged: list[str] = []
    found = run.stages()
    if not any(link.name in STAGES for link in run.links()):
        fix = (
            "See `medusa-distill status`. The same `run` links again what lies there, and makes"
            " what does not."
        )
        raise ConfigError(
            "This run has no stage: there is nothing to verify.", str(run.path / "latest"), fix
        )
    for link in run.links():
        if link.name in STAGES and link.name not in found:
            damaged.append(f"{link.name}: {link.readlink().name} is missing")
            print_stage(console, "[red]damaged[/]", link.name, "no directory")
    for name, stage in found.items():
        problems = stage.verify()
        damaged += [f"{name}: {problem}" for problem in problems]
        state = (
            f"{len(stage.done.files)} files"
            if stage.done
            else f"{len(stage.shards())} shards, unfinished"
        )
        print_stage(console, "[red]damaged[/]" if problems else "[green]ok[/]     ", name, state)
    if damaged:
        raise CheckFailed(
            "Damaged: " + "; ".join(damaged) + ".",
            str(run.path),
            "Delete these files and run the same configuration again: they are made anew, a log by"
            " --fresh STAGE.",
        )
    seeds = found.get("seeds")
    if seeds is None or not seeds.done:
        return
    if shared := questions_in_two_splits(seeds.shards()):
        raise CheckFailed(
            f'{len(shared)} questions open conversations of two splits, "{shorten(shared[0], 100)}"'
            " among them: held-out prompts are not new.",
            str(seeds.path),
            "Run the same configuration again: the seeds are split by their first question.",
        )
    print_stage(console, "[green]ok[/]     ", "splits", "no question opens conversations of two")
