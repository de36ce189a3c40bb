"""`medusa-distill verify`: compare every file of a run with its recorded sha256."""

from __future__ import annotations

from rich.console import Console

from pipeline.cli.arguments import RunArgument
from pipeline.errors import CheckFailed, ConfigError
from pipeline.execution.progress import print_stage
from pipeline.storage.run_directory import RunDirectory


def verify(
    run_dir: RunArgument,
) -> None:
    """Compare the size and sha256 of every file with DONE.json; exit 1 if a file is damaged."""
    run, _ = RunDirectory.open(run_dir)
    console, stages = Console(highlight=False), run.stages()
    if not stages:
        raise ConfigError(
            "This run has no stage to verify.",
            run.path / "latest",
            "Run again: finished stages are relinked, the rest is built.",
        )
    damaged = []
    for link in run.links():
        if link.name not in stages:
            damaged.append(f"{link.name}: {link.readlink().name} is missing")
            print_stage(console, "[red]damaged[/]", link.name, "no directory")
    for name, stage in stages.items():
        problems = stage.verify()
        damaged += [f"{name}: {problem}" for problem in problems]
        state = f"{len(stage.shards())} shards, unfinished"
        if stage.done:
            state = f"{len(stage.done.files)} files"
        print_stage(console, "[red]damaged[/]" if problems else "[green]ok[/]     ", name, state)
    if damaged:
        raise CheckFailed(
            f"Damaged: {'; '.join(damaged)}.",
            run.path,
            "Delete these files and run the same configuration again to rebuild them; a log is"
            " rebuilt by --fresh STAGE.",
        )
