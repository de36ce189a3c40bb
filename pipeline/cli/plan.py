"""`medusa-distill plan`: what a run would do."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.config import Config, PlacementOf
from pipeline.config.load import load_config
from pipeline.errors import EnvironmentFault
from pipeline.execution.executor import InlineExecutor
from pipeline.execution.placement import place
from pipeline.run.estimate import estimate
from pipeline.storage.run_directory import RunDirectory
from pipeline.training.methods import method_of
from pipeline.training.recipe import few_steps

if TYPE_CHECKING:
    from pipeline.run.stage_status import StageStatus
    from pipeline.storage.done import Summary


def plan(
    config: Annotated[Path, typer.Argument(help="A YAML file such as configs/qwen2.5-7b.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as for run.")] = None,
) -> None:
    """Say which stages would run and which are cached, with tokens, disk and workers.

    Starts and writes nothing; of a target on the Hub it fetches the configuration alone.
    """
    from pipeline.flow import STAGES
    from pipeline.run.preflight import check_config, not_served, unread_settings
    from pipeline.run.stage_status import stage_statuses  # torch and transformers: --help does not wait for them

    settings = load_config(config, overrides or ())
    check_config(settings, stages=())
    run = RunDirectory(settings.run.directory, settings.run.store)
    console = Console(width=None if Console().is_terminal else 120)
    table = Table("stage", "what", "shards", "why", box=None, header_style="bold")
    states = stage_statuses(run, settings, STAGES)
    for name, state in states.items():
        if STAGES[name].asked_for(settings):
            what = {"done": "kept", "failed": "kept", "skipped": "skip"}.get(state.status, "run")
            table.add_row(name, what, _shards(state), Text(state.why))
    console.print(table)
    for warning in unread_settings(settings):
        console.print(f"[yellow]![/] {warning}", highlight=False, soft_wrap=True)
    figures = estimate(settings, _summary(states["seeds"]), _summary(states["generate"]))
    features = states["features"]
    cached = sum(path.stat().st_size for path in features.directory.shards()) if features.directory else 0
    cached = cached if features.made else 0
    existing = next(path for path in (run.store, *run.store.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if figures.conversations is None or figures.tokens is None or figures.disk_bytes is None:
        work = "An unknown number of conversations: the Hub says it only while they are read, or give a limit"
        need = f"{figures.bytes_per_position:,} bytes for each token that the target will write"
    else:
        tokens = f"{figures.tokens:,} tokens"
        work = f"{figures.conversations:,} conversations, "
        work += f"{tokens} written" if figures.written else f"at most {tokens} to write"
        need = f"as many positions of {figures.bytes_per_position:,} bytes each, {size(figures.disk_bytes)}"
    need = need if figures.bytes_per_position else "no states to cache"
    if method_of(settings.train).tunes_backbone:
        need += ", and a tuned backbone as large as the target"
    here = f", of which {size(cached)} are on the disk" if cached else ""
    console.print(f"\n{work}, {need}{here}; {size(free)} are free.", highlight=False, soft_wrap=True)
    if figures.assumed:
        console.print(figures.assumed, highlight=False, markup=False, soft_wrap=True)
    if drafted := settings.train.draft_vocab:
        what = f"Draft vocabulary: the {drafted:,} most frequent tokens. {not_served(settings) or ''}"
        console.print(what.rstrip(), highlight=False, soft_wrap=True)
    for recipe in figures.recipes:
        steps = f"{'about' if figures.written else 'at most'} {recipe.total_steps:,} steps"
        console.print(f"Training: {steps}: {recipe.described()}.", highlight=False, soft_wrap=True)
    if figures.recipes and (too_few := few_steps(figures.recipes)):
        console.print(f"[yellow]![/] {too_few}", highlight=False, soft_wrap=True)
    for name in type(settings.placement).model_fields:
        console.print(f"{name}: {_workers(name, settings)}", highlight=False, markup=False, soft_wrap=True)
    if features.status != "done" and (figures.disk_bytes or 0) - cached > free:
        console.print("[yellow]That does not fit: name a larger run.store, or fewer rows with limit.[/]")


def _summary(state: StageStatus) -> Summary | None:
    return state.directory.summary if state.status == "done" and state.directory else None


def _shards(state: StageStatus) -> str:
    """The numbers of finished and of pending shards, as far as they are known."""
    pending = (state.expected or 0) - state.made
    parts = [f"{state.made} done"] if state.made else []
    parts += [f"{pending} pending"] if pending > 0 else []
    return ", ".join(parts)


def size(num_bytes: float) -> str:
    """Bytes with a unit: 279 kB, 1.5 GB, 650 GB."""
    for unit, bytes_of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= bytes_of:
            value = num_bytes / bytes_of
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def _workers(stage: str, config: Config) -> str:
    """What a stage's workers get: on this machine the numbers, on a cluster those that are settled already."""
    wanted: PlacementOf = getattr(config.placement, stage)
    if os.environ.get("RAY_ADDRESS"):
        gpus, cpus = (
            "as the cluster has" if value is None else str(value)
            for value in (wanted.gpus_per_worker, wanted.cpus_per_worker)
        )
        return f"{wanted.workers} worker(s), GPU each: {gpus}, CPU each: {cpus}"
    try:
        placed = place(stage, wanted, InlineExecutor().resources())
    except EnvironmentFault as error:
        return f"not on this machine. {error.what}"
    return f"{placed.workers} worker(s), {placed.gpus} GPU and {placed.cpus} CPU each"
