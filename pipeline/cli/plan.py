"""`medusa-distill plan`: what a run would do, before it costs anything."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipeline.configuration import load_config
from pipeline.estimate import estimate
from pipeline.states import stage_states
from pipeline.storage.run_directory import RunDirectory


def plan(
    config: Annotated[Path, typer.Argument(help="A YAML file such as configs/zephyr-7b.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as for run.")] = None,
) -> None:
    """Say which stages would run and which are cached, with tokens, disk and workers. Starts and writes nothing."""
    settings = load_config(config, overrides or ())
    run = RunDirectory(settings.run.directory, settings.run.store)
    console = Console(width=None if Console().is_terminal else 120)
    table = Table("stage", "what", "shards", "why", box=None, header_style="bold")
    for name, state in stage_states(run, settings).items():
        if name != "push" or settings.push.repo_id:
            table.add_row(name, "kept" if state.word == "done" else "run", state.shards, state.why)
    console.print(table)
    figures = estimate(run, settings)
    existing = next(path for path in (run.store, *run.store.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    work = f"{figures.conversations} conversations, at most {figures.tokens:,} tokens to write and as many positions"
    disk = f"{figures.bytes_per_position:,} bytes each, {figures.disk_bytes / 1e9:,.1f} GB; {free / 1e9:,.0f} GB free"
    console.print(f"\n{work}, {disk}.", highlight=False, soft_wrap=True)
    placement = settings.placement
    for name in ("generate", "features", "train"):
        wanted = getattr(placement, name)
        gpus, cpus = _or_default(wanted.gpus_per_worker), _or_default(wanted.cpus_per_worker)
        console.print(f"{name}: {wanted.workers} worker(s), {gpus} GPU and {cpus} CPU each", highlight=False)
    if figures.disk_bytes > free:
        console.print("[yellow]That does not fit: name a larger run.store, or fewer rows with limit.[/]")


def _or_default(value: int | None) -> str:
    return "default" if value is None else str(value)
