"""`medusa-distill plan`: what a run would do and what it would cost."""

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
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.placement import most_workers
from pipeline.formatting import duration
from pipeline.formatting import rate as tokens_rate
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.files import has_weights, is_local, one_look_at_the_hub

if TYPE_CHECKING:
    from pipeline.run.estimate import RunSize, StageMemory
    from pipeline.run.resolved import ResolvedRun
    from pipeline.run.stage_status import StageStatus

GIB = 1 << 30
WHAT = {"done": "kept", "failed": "kept", "skipped": "skip"}  # of a stage's status; else it runs
COLUMNS = {
    "weights": "weights",
    "heads": "heads",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "states",
    "cache": "cache",
    "total": "total",
}
TIMED = {"generate": "tokens", "features": "positions", "train": "tokens"}
"""Stages whose hours are estimated, and the figure of their summary that hours are counted by."""


def plan(
    config: Annotated[Path, typer.Argument(help="A YAML file such as configs/qwen2.5-7b.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as for run.")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
) -> None:
    """Show which stages would run and which are cached, and their memory, disk space and hours.

    Refuses what run would refuse (exit 2, 3 or 4). Starts and writes nothing; of a target on the
    Hub it fetches the configuration alone.
    """
    if measure:
        fix = "Leave it out: hours are at the rates of finished stages in the same run.store."
        raise ConfigError("There is no option --measure any more.", "--measure", fix)
    from pipeline.flow import wanted_stages  # imports torch, and --help does not wait
    from pipeline.run.resolved import resolve_run

    settings = load_config(config, overrides or ())
    models = settings.target.model, settings.check.served_model, settings.check.assistant_model
    with one_look_at_the_hub(*models):
        print_plan(resolve_run(settings, wanted_stages(settings)))


def print_plan(run: ResolvedRun) -> None:
    from pipeline.flow import STAGES
    from pipeline.run.checks import check_plan, not_served, unread_settings
    from pipeline.run.estimate import (
        check_memory,
        memory_of_stages,
        planned,
        run_size,
        target_sizes,
    )
    from pipeline.run.stage_status import stage_statuses

    config = run.config
    notes = [*check_plan(run), *unread_settings(run)]
    if is_local(config.target.model) and not has_weights(config.target.model):
        notes.append(
            "The target's directory holds no weights: sizes are its config.json's, and a run would"
            " refuse it."
        )
    directory = RunDirectory(config.run.directory, config.run.store)
    statuses = stage_statuses(directory, run, STAGES)
    console = Console(width=None if Console().is_terminal else 120)
    _print_stages(console, statuses)
    for note in notes:
        _note(console, note)
    elsewhere = planned(run)
    size = run_size(elsewhere, statuses["seeds"].finished, statuses["generate"].finished)
    _print_size(console, run, size, statuses.get("features"), directory.store)
    if config.train.draft_vocab:
        words = f"Draft vocabulary: the {config.train.draft_vocab:,} most frequent tokens."
        if not run.problems:
            words += f" {not_served(run) or ''}"
        _print(console, words.rstrip())
    _print_training(console, size)
    _print_workers(console, run)
    unfinished = [name for name, state in statuses.items() if state.status != "done"]
    _print_hours(console, run, size, directory.store, unfinished)
    target = target_sizes(elsewhere)
    if target is not None:
        memory = memory_of_stages(elsewhere, target)
        _print_memory(console, memory)
        tuned = target.weight_bytes() if run.method.tunes_backbone else 0
        _print_checkpoints(console, run, memory, tuned)
        check_memory(run)


def _print_stages(console: Console, statuses: Mapping[str, StageStatus]) -> None:
    table = Table("stage", "what", "shards", "why", box=None, header_style="bold")
    for name, state in statuses.items():
        shards = [f"{state.made} done"] if state.made else []
        pending = (state.expected or 0) - state.made
        if pending > 0:
            shards.append(f"{pending} pending")
        table.add_row(name, WHAT.get(state.status, "run"), ", ".join(shards), Text(state.why))
    console.print(table)


def _note(console: Console, sentence: str) -> None:
    console.print("[yellow]![/]", end=" ")
    _print(console, sentence)


def _print(console: Console, sentence: str) -> None:
    """Print a sentence; a terminal's width breaks it between words."""
    console.print(sentence, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _print_size(
    console: Console, run: ResolvedRun, size: RunSize, features: StageStatus | None, store: Path
) -> None:
    """Print conversations, tokens and bytes on disk; note where the disk has less."""
    if size.conversations is None or size.tokens is None or size.disk_bytes is None:
        work = "An unknown number of conversations (data sets on the Hub have no limit)"
        need = f"{size.bytes_per_position:,} bytes for each token that the target will write"
    else:
        tokens = f"at most {size.tokens:,} tokens to write"
        if size.written:
            tokens = f"{size.tokens:,} tokens written"
        work = f"{size.conversations:,} conversations, {tokens}"
        states = f"as many positions of {size.bytes_per_position:,} bytes each"
        need = f"{states}, {decimal(size.disk_bytes)}"
    if not size.bytes_per_position:
        need = "no states to cache"
    if run.method.tunes_backbone:
        need += ", and a tuned backbone as large as the target"
    cached = 0
    if features is not None and features.directory is not None and features.made:
        cached = sum(path.stat().st_size for path in features.directory.shards())
        need += f", of which {decimal(cached)} are on the disk"
    parents = [path for path in (store, *store.parents) if path.exists()]
    free = shutil.disk_usage(parents[0]).free
    _print(console, f"\n{work}, {need}; {decimal(free)} are free.")
    if "target.model" in run.problems:
        _print(console, "States are assumed to be of 4,096 numbers in 16 bits, as 7B models have.")
    is_cached = features is not None and features.status == "done"
    if not is_cached and (size.disk_bytes or 0) - cached > free:
        _note(console, "That does not fit on the disk: name a larger run.store, or set limits.")


def _print_training(console: Console, size: RunSize) -> None:
    from pipeline.training.recipe import too_few_steps

    bound = "about" if size.written else "at most"
    for recipe in size.recipes:
        steps = f"{bound} {recipe.total_steps:,} steps: {recipe.describe()}"
        _print(console, f"Training: {steps}.")
    too_few = too_few_steps(size.recipes) if size.recipes else None
    if too_few:
        _note(console, too_few)


def _print_workers(console: Console, run: ResolvedRun) -> None:
    placement = run.config.placement
    is_elsewhere = os.environ.get("RAY_ADDRESS") or placement.gpu_memory_gb
    for section, wanted in placement.of_stages().items():
        if is_elsewhere:
            settings = wanted.model_dump(exclude_none=True)
            words = ", ".join(f"{key} {value}" for key, value in settings.items())
            _print(console, f"{section}: {words}; the rest as the cluster has it")
            continue
        try:
            placed = run.placement(section)
        except EnvironmentFault as error:
            _print(console, f"{section}: not on this machine. {error.what}")
            continue
        words = f"{placed.workers} worker(s), {placed.gpus} GPU and {placed.cpus} CPU each"
        most = most_workers(wanted, run.machine)
        if most > placed.workers:
            words += f"; there is room for {most}: placement.{section}.workers=auto takes them"
        _print(console, f"{section}: {words}")


def _print_hours(
    console: Console, run: ResolvedRun, size: RunSize, store: Path, unfinished: Sequence[str]
) -> None:
    """Print the hours of stages of which the store has a finished one, at the newest one's rate."""
    for stage, counted in TIMED.items():
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
        made = f"{tokens_rate(rate)} tokens/s of {done[-1].parent.name}"
        _print(console, f"{stage}: at most {duration(seconds)}, at the {made}.")


def _print_memory(console: Console, memory: Iterable[StageMemory]) -> None:
    """Print GiB of each stage's worker on one of its devices, and the size of the device."""
    from pipeline.run.estimate import TOLERANCE

    table = Table("GiB", *COLUMNS.values(), "there is", box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    notes = []
    for stage in memory:
        numbers = []
        for part in COLUMNS:
            gib = getattr(stage, part) / GIB
            numbers.append(f"{gib:.1f}" if gib else "")
        room = stage.device_bytes
        table.add_row(stage.name, *numbers, "?" if room is None else f"{room / GIB:.1f}")
        if stage.fits() and not stage.fits(-TOLERANCE):
            settings = ", ".join(stage.saves_memory)
            notes.append(f"{stage.name} may not fit. What helps most: {settings}.")
        unknown = "The size of the cluster's devices is unknown: give placement.gpu_memory_gb."
        if room is None and unknown not in notes:
            notes.append(unknown)
    _print(
        console, f"\nMemory of one worker on each of its devices, an estimate, ±{TOLERANCE:.0%}:"
    )
    console.print(table)
    for note in notes:
        _print(console, note)


def _print_checkpoints(
    console: Console, run: ResolvedRun, memory: Iterable[StageMemory], tuned_bytes: float
) -> None:
    """Print the bytes on disk of checkpoints (with the optimizer's state), of heads and of a tuned
    backbone.
    """
    trained = [stage for stage in memory if stage.stage == "train"]
    heads = decimal(int(max(stage.heads for stage in trained)))
    checkpoint = decimal(int(max(stage.heads + stage.optimizer for stage in trained)))
    tuned = f", a tuned backbone of {decimal(int(tuned_bytes))}" if tuned_bytes else ""
    kept = run.config.train.keep_checkpoints
    _print(
        console,
        f"On the disk, besides: {kept} checkpoint(s) of {checkpoint}, heads of {heads}{tuned}.",
    )
