"""`medusa-distill plan`: what a run would do, and what it would cost; plain text where the output
is no terminal.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Mapping
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
from pipeline.execution.machine import GIB
from pipeline.execution.placement import most_workers, place
from pipeline.formatting import duration
from pipeline.formatting import rate as tokens_rate
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.files import has_weights, is_local, one_look_at_the_hub
from pipeline.training.methods import method_of
from pipeline.training.recipe import few_steps

if TYPE_CHECKING:
    from pipeline.run.estimate import RunSize, StageMemory, TargetSizes
    from pipeline.run.stage_status import StageStatus

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
TIMED = {
    "generate": "tokens",
    "features": "positions",
    "train": "tokens",
}  # what hours are counted by


def plan(
    config: Annotated[Path, typer.Argument(help="A YAML file such as configs/qwen2.5-7b.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, as for run.")
    ] = None,
) -> None:
    """Say which stages would run and which are cached; what they take of memory and disk, and what
    cannot fit.

    Refuses what run would refuse (exit 2, 3 or 4). Starts and writes nothing; of a target on the
    Hub it fetches the configuration alone.
    """
    settings = load_config(config, overrides or ())
    with one_look_at_the_hub(
        settings.target.model, settings.check.served_model, settings.check.assistant_model
    ):
        _plan(settings)


def _plan(config: Config) -> None:
    from pipeline.flow import (
        STAGES,
        wanted_stages,
    )  # torch and transformers: --help does not wait for them
    from pipeline.run.estimate import memory_of_stages, require_memory, run_size
    from pipeline.run.preflight import check_config, unread_settings
    from pipeline.run.stage_status import stage_statuses

    notes: list[str] = []
    check_config(config, wanted_stages(config, tuple(STAGES)), notes=notes)
    if is_local(config.target.model) and not has_weights(config.target.model):
        notes.append(
            "The target's directory holds no weights: sizes are its config.json's, and a run would"
            " refuse it."
        )
    run = RunDirectory(config.run.directory, config.run.store)
    console = Console(width=None if Console().is_terminal else 120)
    statuses = stage_statuses(run, config, STAGES)
    _print_stages(
        console, {name: statuses[name] for name in statuses if STAGES[name].asked_for(config)}
    )
    _warn(console, [*unread_settings(config), *notes])
    figures = run_size(config, statuses["seeds"].finished, statuses["generate"].finished)
    _print_size(console, config, figures, statuses, _free_disk(run))
    _print_draft_vocabulary(console, config)
    _print_training(console, figures)
    _print_workers(console, config)
    unfinished = [
        name for name, state in statuses.items() if state.status not in ("done", "skipped")
    ]
    _print_hours(console, config, figures, run.store, unfinished)
    target = _target_or_none(config)
    if target is not None:
        found = memory_of_stages(config, target, figures.positions)
        _print_memory(console, found)
        _print_what_training_leaves(console, config, target, found)
        require_memory([each for each in found if each.stage in unfinished])


def _target_or_none(config: Config) -> TargetSizes | None:
    """The target's sizes; None where nobody knows them, or the Hub cannot be reached, which is said
    above.
    """
    from pipeline.run.estimate import target_sizes

    try:
        return target_sizes(config)
    except EnvironmentFault:
        return None


def _print_stages(console: Console, statuses: Mapping[str, StageStatus]) -> None:
    table = Table("stage", "what", "shards", "why", box=None, header_style="bold")
    for name, state in statuses.items():
        shards = [f"{state.made} done"] if state.made else []
        pending = (state.expected or 0) - state.made
        if pending > 0:
            shards.append(f"{pending} pending")
        table.add_row(name, WHAT.get(state.status, "run"), ", ".join(shards), Text(state.why))
    console.print(table)


def _warn(console: Console, warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print("[yellow]![/]", end=" ")
        _say(console, warning)


def _say(console: Console, sentence: str) -> None:
    """Print a sentence on a line of its own, which a terminal's width breaks between words."""
    console.print(sentence, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def _print_size(
    console: Console,
    config: Config,
    figures: RunSize,
    statuses: Mapping[str, StageStatus],
    free: int,
) -> None:
    """Print conversations, tokens and bytes on disk; warn where the disk has less."""
    if figures.conversations is None or figures.tokens is None or figures.disk_bytes is None:
        work = (
            "An unknown number of conversations: the Hub says it only while they are read, or give"
            " a limit"
        )
        need = f"{figures.bytes_per_position:,} bytes for each token that the target will write"
    else:
        bound = (
            f"{figures.tokens:,} tokens written"
            if figures.written
            else f"at most {figures.tokens:,} tokens to write"
        )
        work = f"{figures.conversations:,} conversations, {bound}"
        need = (
            f"as many positions of {figures.bytes_per_position:,} bytes each,"
            f" {size(figures.disk_bytes)}"
        )
    if not figures.bytes_per_position:
        need = "no states to cache"
    if method_of(config.train).tunes_backbone:
        need += ", and a tuned backbone as large as the target"
    cached = _cached_bytes(statuses.get("features"))
    if cached:
        need += f", of which {size(cached)} are on the disk"
    _say(console, f"\n{work}, {need}; {size(free)} are free.")
    if figures.assumed:
        _say(console, figures.assumed)
    features = statuses.get("features")
    is_cached = features is not None and features.status == "done"
    if not is_cached and (figures.disk_bytes or 0) - cached > free:
        _warn(
            console,
            ["That does not fit on the disk: name a larger run.store, or fewer rows with limit."],
        )


def _cached_bytes(features: StageStatus | None) -> int:
    """What lies on the disk of the states already."""
    if features is None or features.directory is None or not features.made:
        return 0
    return sum(path.stat().st_size for path in features.directory.shards())


def _free_disk(run: RunDirectory) -> int:
    return shutil.disk_usage(
        next(path for path in (run.store, *run.store.parents) if path.exists())
    ).free


def size(num_bytes: float) -> str:
    """Bytes with a unit: 279 kB, 1.5 GB, 650 GB."""
    for unit, bytes_of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= bytes_of:
            value = num_bytes / bytes_of
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def _print_draft_vocabulary(console: Console, config: Config) -> None:
    from pipeline.run.preflight import not_served

    if config.train.draft_vocab:
        words = f"Draft vocabulary: the {config.train.draft_vocab:,} most frequent tokens."
        _say(console, f"{words} {not_served(config) or ''}".rstrip())


def _print_training(console: Console, figures: RunSize) -> None:
    for recipe in figures.recipes:
        bound = "about" if figures.written else "at most"
        _say(console, f"Training: {bound} {recipe.total_steps:,} steps: {recipe.described()}.")
    too_few = few_steps(figures.recipes) if figures.recipes else None
    if too_few:
        _warn(console, [too_few])


def _print_workers(console: Console, config: Config) -> None:
    is_elsewhere = os.environ.get("RAY_ADDRESS") or config.placement.gpu_memory_gb
    for name, wanted in config.placement.of_stages().items():
        placed = _workers_elsewhere(wanted) if is_elsewhere else _workers_here(name, wanted)
        _say(console, f"{name}: {placed}")


def _workers_elsewhere(wanted: PlacementOf) -> str:
    """What a stage's workers get of a cluster, as far as it is settled already."""
    workers = f"{wanted.workers} worker(s)"
    if wanted.workers == "auto":
        workers = "as many workers as there is room for"
    gpus, cpus = wanted.gpus_per_worker, wanted.cpus_per_worker
    each_gpus = "as the cluster has" if gpus is None else gpus
    each_cpus = "as the cluster has" if cpus is None else cpus
    return f"{workers}, GPU each: {each_gpus}, CPU each: {each_cpus}"


def _workers_here(stage: str, wanted: PlacementOf) -> str:
    """What a stage's workers get of this machine, and how many more it has room for."""
    have = InlineExecutor().resources()
    try:
        placed = place(stage, wanted, have)
    except EnvironmentFault as error:
        return f"not on this machine. {error.what}"
    words = f"{placed.workers} worker(s), {placed.gpus} GPU and {placed.cpus} CPU each"
    most = most_workers(wanted, have)
    if most > placed.workers:
        words += f"; there is room for {most}: placement.{stage}.workers=auto takes them"
    return words


def _print_hours(
    console: Console, config: Config, figures: RunSize, store: Path, unfinished: Collection[str]
) -> None:
    """Print the hours of stages of which the store has a finished one, at the newest one's rate."""
    have = InlineExecutor().resources()
    for stage, counted in TIMED.items():
        done = sorted(store.glob(f"{stage}-*/DONE.json"), key=lambda path: path.stat().st_mtime)
        if stage not in unfinished or figures.tokens is None or not done:
            continue
        summary = StageDirectory.at(done[-1].parent).summary
        if not summary.get("tokens_per_second") or not summary.get("tokens"):
            continue
        rate = summary["tokens_per_second"] * summary[counted] / summary["tokens"]
        if stage == "train":  # whose rate is of all its workers
            seconds = (
                sum(recipe.total_steps * recipe.batch_tokens for recipe in figures.recipes) / rate
            )
        else:
            wanted = config.placement.of_stages()[stage]
            workers = (
                wanted.workers if wanted.workers != "auto" else max(1, most_workers(wanted, have))
            )
            seconds = figures.tokens / (rate * workers)
        _say(
            console,
            f"{stage}: at most {duration(seconds)}, at the {tokens_rate(rate)} tokens/s of"
            f" {done[-1].parent.name}.",
        )


def _print_memory(console: Console, found: Collection[StageMemory]) -> None:
    """Print GiB of each stage's worker on one of its devices, and what the device has."""
    from pipeline.run.estimate import TOLERANCE

    table = Table("GiB", box=None, header_style="bold")
    for title in (*COLUMNS.values(), "there is"):
        table.add_column(title, justify="right")
    for each in found:
        numbers = []
        for part in COLUMNS:
            gib = getattr(each, part) / GIB
            numbers.append(f"{gib:.1f}" if gib else "")
        has = "?" if each.device_bytes is None else f"{each.device_bytes / GIB:.1f}"
        table.add_row(each.name, *numbers, has)
    _say(console, f"\nMemory of one worker on each of its devices, an estimate, ±{TOLERANCE:.0%}:")
    console.print(table)
    for each in found:
        if each.fits() and not each.fits(-TOLERANCE):
            _say(
                console,
                f"{each.name} may not fit. What helps most: {', '.join(each.saves_memory)}.",
            )
    if any(each.device_bytes is None for each in found):
        _say(
            console,
            "What the cluster's devices have is not known from here: give placement.gpu_memory_gb.",
        )


def _print_what_training_leaves(
    console: Console, config: Config, target: TargetSizes, found: Collection[StageMemory]
) -> None:
    """Print the bytes on disk of checkpoints (with the optimizer's state), of heads and of a tuned
    backbone.
    """
    trained = [each for each in found if each.stage == "train"]
    heads = max(each.heads for each in trained)
    checkpoint = max(each.heads + each.optimizer for each in trained)
    tuned = ""
    if method_of(config.train).tunes_backbone:
        tuned = f", a tuned backbone of {size(target.weight_bytes())}"
    kept = config.train.keep_checkpoints
    _say(
        console,
        f"On the disk, besides: {kept} checkpoint(s) of {size(checkpoint)}, heads of"
        f" {size(heads)}{tuned}.",
    )
