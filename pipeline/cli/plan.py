"""`medusa-distill plan`: print what a run would do and cost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from pipeline.config.load import load_config
from pipeline.errors import EnvironmentFault
from pipeline.execution.placement import most_workers
from pipeline.formatting import duration
from pipeline.formatting import rate as tokens_rate
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory

if TYPE_CHECKING:
    from pipeline.run.estimate import RunSize, StageMemory
    from pipeline.run.resolved import ResolvedRun
    from pipeline.run.stage_status import StageStatus

GIB = 1 << 30
ACTIONS = {"done": "kept", "failed": "kept", "skipped": "skip"}  # by a stage's status; else it runs
COLUMNS = {
    "weights": "weights",
    "heads": "heads",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "states",
    "cache": "cache",
    "total": "total",
}
TIMED_STAGES = {"generate": "tokens", "features": "positions", "train": "tokens"}
"""Stages whose hours are estimated, and the figure of their summary that hours are counted by."""


def plan(
    config: Annotated[Path, typer.Argument(help="A YAML file such as configs/qwen2.5-7b.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as for run.")
    ] = None,
) -> None:
    """Show which stages would run and which are cached, and their memory, disk space and hours.

    Refuses what run would refuse (exit 2, 3 or 4). Starts and writes nothing; of a target on the
    Hub it fetches the configuration alone.
    """
    from pipeline.flow import wanted_stages  # imports torch, and --help does not wait
    from pipeline.run.resolved import resolve_run

    settings = load_config(config, overrides or ())
    print_plan(resolve_run(settings, wanted_stages(settings)))


def print_plan(run: ResolvedRun) -> None:
    """Print the plan of a run; raise EnvironmentFault where a stage does not fit into memory."""
    from pipeline.flow import STAGES
    from pipeline.run.checks import check_plan, unread_settings
    from pipeline.run.estimate import (
        check_memory,
        memory_of_stages,
        on_planned_gpus,
        run_size,
        target_sizes,
    )
    from pipeline.run.stage_status import stage_statuses

    notes = [*check_plan(run), *unread_settings(run)]
    directory = RunDirectory(run.config.run.directory, run.config.run.store)
    statuses = stage_statuses(directory, run, STAGES)
    console = Console(width=None if Console().is_terminal else 120)
    _print_stages(console, statuses)
    for note in notes:
        _print(console, f"! {note}")
    elsewhere = on_planned_gpus(run)
    size = run_size(elsewhere, statuses["seeds"].finished, statuses["generate"].finished)
    _print_size(console, size, statuses["features"], directory.store)
    _print_training(console, size)
    _print_workers(console, run)
    unfinished = [name for name, state in statuses.items() if state.status != "done"]
    _print_hours(console, run, size, directory.store, unfinished)
    target = target_sizes(elsewhere)
    if target is not None:
        memory = memory_of_stages(elsewhere, target, size.positions)
        _print_memory(console, memory)
        trained = [stage for stage in memory if stage.stage == "train"]
        checkpoint = decimal(int(max(stage.heads + stage.optimizer for stage in trained)))
        line = f"Disk: {run.config.train.keep_checkpoints} checkpoint(s) of {checkpoint}"
        if run.method.tunes_backbone:
            line += f", a tuned backbone of {decimal(int(target.weight_bytes()))}"
        _print(console, f"{line}.")
        check_memory(run)


def _print(console: Console, sentence: str) -> None:
    """Print a sentence; a terminal's width breaks it between words."""
    console.print(sentence, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _print_stages(console: Console, statuses: Mapping[str, StageStatus]) -> None:
    table = Table("stage", "what", "shards", "why", box=None, header_style="bold")
    for name, state in statuses.items():
        shards = [f"{state.made} done"] if state.made else []
        pending = (state.expected or 0) - state.made
        if pending > 0:
            shards.append(f"{pending} pending")
        action = ACTIONS.get(state.status, "run")
        table.add_row(name, action, ", ".join(shards), Text(state.why))
    console.print(table)


def _print_size(console: Console, size: RunSize, features: StageStatus, store: Path) -> None:
    """Print conversations, tokens and bytes on disk; warn where the disk has less."""
    need = f"{size.bytes_per_position:,} bytes of states per token"
    if not size.bytes_per_position:
        need = "no states to cache"
    if size.conversations is None or size.tokens is None or size.disk_bytes is None:
        work = "An unknown number of conversations (data sets on the Hub have no limit)"
    else:
        bound = "" if size.written else "at most "
        work = f"{size.conversations:,} conversations, {bound}{size.tokens:,} tokens"
        need += f", {decimal(size.disk_bytes)}"
    cached = 0
    if features.directory is not None and features.made:
        cached = sum(path.stat().st_size for path in features.directory.parquet_files())
        need += f", {decimal(cached)} of them cached"
    parents = [path for path in (store, *store.parents) if path.exists()]
    free = shutil.disk_usage(parents[0]).free
    _print(console, f"\n{work}, {need}; {decimal(free)} of the disk are free.")
    if features.status != "done" and (size.disk_bytes or 0) - cached > free:
        _print(console, "! This does not fit on the disk: name a larger run.store, or set limits.")


def _print_training(console: Console, size: RunSize) -> None:
    from pipeline.training.recipe import too_few_steps

    bound = "about" if size.written else "at most"
    for recipe in size.recipes:
        steps = f"{bound} {recipe.total_steps:,} steps: {recipe.describe()}"
        _print(console, f"Training: {steps}.")
    too_few = too_few_steps(size.recipes) if size.recipes else None
    if too_few:
        _print(console, f"! {too_few}")


def _print_workers(console: Console, run: ResolvedRun) -> None:
    """Print the workers of each stage, if the run is on this machine."""
    placement = run.config.placement
    if os.environ.get("RAY_ADDRESS") or placement.gpu_memory_gb:
        return
    for section, wanted in placement.of_stages().items():
        try:
            placed = run.placement(section)
        except EnvironmentFault as error:
            _print(console, f"{section}: not on this machine. {error.what}")
            continue
        line = (
            f"{section}: {placed.workers} worker(s), {placed.gpus} GPU and {placed.cpus} CPU each"
        )
        most = most_workers(wanted, run.machine)
        if most > placed.workers:
            line += f"; there is room for {most}: placement.{section}.workers=auto takes them"
        _print(console, line)


def _print_hours(
    console: Console, run: ResolvedRun, size: RunSize, store: Path, unfinished: Sequence[str]
) -> None:
    """Print the hours of unfinished stages, at the rate of the store's newest finished one."""
    for stage, counted in TIMED_STAGES.items():
        done = sorted(store.glob(f"{stage}-*/DONE.json"), key=lambda path: path.stat().st_mtime)
        if stage not in unfinished or size.tokens is None or not done:
            continue
        summary = StageDirectory.at(done[-1].parent).summary
        if not summary.get("tokens_per_second") or not summary.get("tokens"):
            continue
        rate = summary["tokens_per_second"] * summary[counted] / summary["tokens"]
        if stage == "train":  # its rate is that of all workers
            steps = (recipe.total_steps * recipe.batch_tokens for recipe in size.recipes)
            seconds = sum(steps) / rate
        else:
            seconds = size.tokens / (rate * run.workers_of(stage))
        measured = f"{tokens_rate(rate)} tokens/s of {done[-1].parent.name}"
        _print(console, f"{stage}: at most {duration(seconds)}, at the {measured}.")


def _print_memory(console: Console, memory: Iterable[StageMemory]) -> None:
    """Print GiB of each stage's worker on one of its devices, and the size of the device."""
    from pipeline.run.estimate import TOLERANCE

    table = Table("GiB", *COLUMNS.values(), "there is", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    notes = []
    for stage in memory:
        cells = []
        for part in COLUMNS:
            gib = getattr(stage, part) / GIB
            cells.append(f"{gib:.1f}" if gib else "")
        device = "?" if stage.device_bytes is None else f"{stage.device_bytes / GIB:.1f}"
        table.add_row(stage.name, *cells, device)
        if stage.fits() and not stage.fits(-TOLERANCE):
            settings = ", ".join(stage.saves_memory)
            notes.append(f"{stage.name} may not fit. What helps most: {settings}.")
    caption = f"\nMemory of one worker on each of its devices, an estimate, ±{TOLERANCE:.0%}:"
    _print(console, caption)
    console.print(table)
    for note in notes:
        _print(console, note)
