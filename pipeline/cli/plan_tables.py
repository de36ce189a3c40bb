"""How `plan` shows what it has found: within 80 columns, and plain text where the output is no terminal."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.config import Config, PlacementOf
from pipeline.errors import EnvironmentFault
from pipeline.execution.device_memory import GIB
from pipeline.execution.executor import InlineExecutor
from pipeline.execution.placement import most_workers, place
from pipeline.training.methods import method_of
from pipeline.training.recipe import few_steps

if TYPE_CHECKING:
    from pipeline.run.estimate import RunSize
    from pipeline.run.rates import Rates
    from pipeline.run.stage_budget import StageBudget
    from pipeline.run.stage_status import StageStatus
    from pipeline.targets.sizes import TargetSizes

MEMORY_COLUMNS = {
    "weights": "weights",
    "heads": "heads",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "states",
    "cache": "cache",
}


def print_stages(console: Console, statuses: Mapping[str, StageStatus]) -> None:
    table = Table("stage", "what", "shards", "why", box=None, header_style="bold")
    for name, state in statuses.items():
        what = {"done": "kept", "failed": "kept", "skipped": "skip"}.get(state.status, "run")
        table.add_row(name, what, _shards(state), Text(state.why))
    console.print(table)


def _shards(state: StageStatus) -> str:
    """The numbers of finished and of pending shards, as far as they are known."""
    pending = (state.expected or 0) - state.made
    parts = [f"{state.made} done"] if state.made else []
    parts += [f"{pending} pending"] if pending > 0 else []
    return ", ".join(parts)


def warn(console: Console, warnings: Iterable[str]) -> None:
    for warning in warnings:
        console.print("[yellow]![/]", end=" ")
        say(console, warning)


def say(console: Console, sentence: str) -> None:
    """A sentence on a line of its own, which a terminal's width breaks between words."""
    console.print(sentence, highlight=False, markup=False, soft_wrap=not console.is_terminal)


def print_size(console: Console, config: Config, figures: RunSize, cached: int, free: int) -> None:
    """Conversations, tokens, and GB on disk."""
    if figures.conversations is None or figures.tokens is None or figures.disk_bytes is None:
        work = "An unknown number of conversations: the Hub says it only while they are read, or give a limit"
        need = f"{figures.bytes_per_position:,} bytes for each token that the target will write"
    else:
        tokens = f"{figures.tokens:,} tokens"
        work = f"{figures.conversations:,} conversations, "
        work += f"{tokens} written" if figures.written else f"at most {tokens} to write"
        need = f"as many positions of {figures.bytes_per_position:,} bytes each, {size(figures.disk_bytes)}"
    need = need if figures.bytes_per_position else "no states to cache"
    if method_of(config.train).tunes_backbone:
        need += ", and a tuned backbone as large as the target"
    here = f", of which {size(cached)} are on the disk" if cached else ""
    say(console, f"\n{work}, {need}{here}; {size(free)} are free.")
    if figures.assumed:
        say(console, figures.assumed)


def size(num_bytes: float) -> str:
    """Bytes with a unit: 279 kB, 1.5 GB, 650 GB."""
    for unit, bytes_of in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= bytes_of:
            value = num_bytes / bytes_of
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:,.1f} {unit}"
    return f"{num_bytes:,.0f} bytes"


def print_training(console: Console, figures: RunSize) -> None:
    for recipe in figures.recipes:
        steps = f"{'about' if figures.written else 'at most'} {recipe.total_steps:,} steps"
        say(console, f"Training: {steps}: {recipe.described()}.")
    if figures.recipes and (too_few := few_steps(figures.recipes)):
        warn(console, [too_few])


def print_workers(console: Console, config: Config) -> None:
    for name, wanted in config.placement.of_stages().items():
        elsewhere = bool(os.environ.get("RAY_ADDRESS") or config.placement.gpu_memory_gb)
        said = _workers_elsewhere(wanted) if elsewhere else _workers(name, wanted)
        say(console, f"{name}: {said}")


def workers_of(config: Config) -> dict[str, int]:
    """How many workers each stage is asked to have; `auto` as many as there is room for here."""
    have = InlineExecutor().resources()
    return {
        name: max(1, most_workers(wanted, have)) if wanted.workers == "auto" else wanted.workers
        for name, wanted in config.placement.of_stages().items()
    }


def _workers_elsewhere(wanted: PlacementOf) -> str:
    """What a stage's workers get of a cluster, as far as it is settled already."""
    gpus, cpus = (
        "as the cluster has" if value is None else str(value)
        for value in (wanted.gpus_per_worker, wanted.cpus_per_worker)
    )
    workers = "as many workers as there is room for" if wanted.workers == "auto" else f"{wanted.workers} worker(s)"
    return f"{workers}, GPU each: {gpus}, CPU each: {cpus}"


def _workers(stage: str, wanted: PlacementOf) -> str:
    """What a stage's workers get of this machine, and how many more it has room for."""
    have = InlineExecutor().resources()
    try:
        placed = place(stage, wanted, have)
    except EnvironmentFault as error:
        return f"not on this machine. {error.what}"
    said = f"{placed.workers} worker(s), {placed.gpus} GPU and {placed.cpus} CPU each"
    if (most := most_workers(wanted, have)) > placed.workers:
        said += f"; there is room for {most}: placement.{stage}.workers=auto takes them"
    return said


def print_memory(console: Console, budgets: Collection[StageBudget]) -> None:
    """GiB of each stage's worker on one of its devices, and what the device has."""
    table = Table(box=None, header_style="bold")
    table.add_column("GiB")
    for name in (*MEMORY_COLUMNS.values(), "total", "there is"):
        table.add_column(name, justify="right")
    for budget in budgets:
        parts = budget.memory.parts()
        has = "?" if budget.device.memory is None else f"{budget.device.memory / GIB:.1f}"
        numbers = [f"{parts[name] / GIB:.1f}" if parts[name] else "" for name in MEMORY_COLUMNS]
        table.add_row(budget.stage, *numbers, f"{budget.memory.total / GIB:.1f}", has)
    say(console, "\nMemory of one worker at its peak, on each of its devices:")
    console.print(table)
    for budget in budgets:
        if budget.fits and not budget.fits_at_once:
            say(console, f"{budget.stage} {budget.otherwise}.")
        if budget.whole and budget.whole != budget.memory:
            what = "splits heads, gradients and optimizer over its workers"
            say(
                console,
                f"{budget.stage} {what} (train.shard_heads); whole it would take {budget.whole.total / GIB:.1f} GiB.",
            )
    on_host = [f"{budget.stage} {budget.on_host / GIB:.1f}" for budget in budgets if budget.on_host > 0.05 * GIB]
    if on_host:
        said = "Of its machine's own memory a worker takes besides, at most, in GiB"
        say(console, f"{said}: {', '.join(on_host)} (states that wait to be written; heads that are whole at first).")
    if any(budget.device.memory is None for budget in budgets):
        say(console, "What the cluster's devices have is not known from here: give placement.gpu_memory_gb.")


def print_disk(console: Console, config: Config, sizes: TargetSizes, budgets: Collection[StageBudget]) -> None:
    """GB of what training leaves besides the states; a checkpoint has the optimizer's state too."""
    trained = [budget.whole or budget.memory for budget in budgets if budget.placed == "train"]
    heads = max((memory.heads for memory in trained), default=0)
    moments = max((memory.optimizer for memory in trained), default=0)
    kept = config.train.keep_checkpoints
    tuned = f", a tuned backbone of {size(sizes.weight_bytes())}" if method_of(config.train).tunes_backbone else ""
    checkpoints = f"{kept} checkpoint{'s' if kept > 1 else ''} of up to {size(heads + moments)} each"
    say(console, f"On the disk, besides: {checkpoints}, heads of up to {size(heads)}{tuned}.")


def print_hours(console: Console, stages: Collection[str], rates: Rates, needed: Mapping[str, float | None]) -> None:
    """Hours of each stage that is not finished, by rates that are known."""
    for stage in stages:
        if stage in needed:
            rate, hours = rates[stage], needed[stage]
            time = "" if hours is None else f"at most {_duration(hours)}, "
            speed = (
                f"{rate.tokens_per_second:,.0f}" if rate.tokens_per_second >= 10 else f"{rate.tokens_per_second:.2g}"
            )
            say(console, f"{stage}: {time}by the {speed} tokens/s {rate.source}.")
    unknown = [stage for stage in stages if stage not in needed]
    if unknown:
        fix = "plan --measure tries a few rows, and earlier runs of this target on this hardware count."
        say(console, f"How long {_listed(unknown)} will take is not known: {fix}")


def _duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{max(1, round(hours * 60))} minutes"


def _listed(names: Collection[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
