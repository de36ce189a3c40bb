"""The output of `medusa-distill plan`.

It shows the state of each stage, tokens and disk space, training steps, workers, hours and memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.filesize import decimal

from pipeline.cli.plan_times import time_lines
from pipeline.errors import EnvironmentFault
from pipeline.execution.placement import most_workers
from pipeline.flow import STAGES
from pipeline.report.text_table import print_grid, wide_console
from pipeline.run.checks import check_plan, warnings
from pipeline.run.context import Context
from pipeline.run.estimate import (
    GIB,
    TOLERANCE,
    RunSize,
    StageMemory,
    check_memory,
    memory_of_stages,
    on_planned_gpus,
    run_size,
    target_sizes,
)
from pipeline.run.kept_seeds import count_seed_rows
from pipeline.run.resolved import ResolvedRun
from pipeline.run.stage_status import FINISHED, StageStatus, stage_statuses
from pipeline.stages.seeds import require_enough_rows
from pipeline.storage.atomic import free_disk, require_free_disk
from pipeline.storage.receipts import Summary
from pipeline.storage.run_directory import CACHES, RunDirectory
from pipeline.training.recipe import too_few_steps

ACTIONS = {"done": "kept", "failed": "kept", "skipped": "skip"}  # by a stage's status; else it runs
COLUMNS = {
    "weights": "weights",
    "heads": "heads",
    "gradients": "grads",
    "optimizer": "optim",
    "activations": "states",
    "total": "total",
}


def print_plan(run: ResolvedRun) -> None:
    """Print the output of `plan`; raise EnvironmentFault if a stage does not fit into memory."""
    notes = [f"! {note}" for note in (*check_plan(run), *warnings(run))]
    directory = RunDirectory(run.config.run.directory, run.config.run.store)
    context = Context(run, directory, read_only=True)
    statuses = stage_statuses(context, STAGES)
    elsewhere = on_planned_gpus(run)
    seeds = statuses["seeds"].finished or count_seed_rows(run.config)
    generated = statuses["generate"].finished
    size = run_size(elsewhere, seeds, generated)
    unfinished = [name for name, state in statuses.items() if state.status not in FINISHED]
    if unfinished:
        try:
            require_free_disk(directory.store, run.config.limits.min_free_disk_gb)
        except EnvironmentFault as fault:
            notes.append(f"! {fault}")
    console = wide_console()
    _print_stages(console, statuses)
    _print_lines(console, notes)
    _print_lines(console, _seed_lines(seeds))
    _print_lines(console, _size_lines(size, statuses, context))
    if statuses["seeds"].finished is None and size.conversations is not None:
        require_enough_rows(size.conversations, run.config.seeds.holdout, "seeds.sources")
    _print_lines(console, _training_lines(size))
    _print_lines(console, _worker_lines(run, unfinished))
    target = target_sizes(elsewhere)
    _print_lines(console, time_lines(context, elsewhere, size, target, unfinished))
    if target is not None:
        memory = memory_of_stages(elsewhere, target, size.positions)
        _print_memory(console, memory)
        check_memory(run)


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines of text for `plan`; a terminal wraps long ones between words."""
    for line in lines:
        console.print(line, markup=False, soft_wrap=not console.is_terminal)


def _print_stages(console: Console, statuses: Mapping[str, StageStatus]) -> None:
    """Print the stages for `plan`: whether each runs or is kept, its shards, and the reason."""
    rows = []
    for name, state in statuses.items():
        shards = [f"{state.made} done"] if state.made else []
        pending = (state.expected or 0) - state.made
        if pending > 0:
            shards.append(f"{pending} pending")
        rows.append((name, ACTIONS.get(state.status, "run"), ", ".join(shards), state.why))
    print_grid(console, ("stage", "what", "shards", "why"), rows)


def _seed_lines(seeds: Summary | None) -> Iterator[str]:
    """Yield the lines of `plan` that list unread columns and dropped rows of the seeds."""
    for warning in (seeds or {}).get("warnings", ()):
        yield f"! {warning}"
    reasons = (seeds or {}).get("reasons")
    if reasons:
        shown = [f"{reason} {number:,}" for reason, number in sorted(reasons.items())]
        yield f"\nThe seeds stage drops {sum(reasons.values()):,} rows: {', '.join(shown)}."


def _size_lines(
    size: RunSize, statuses: Mapping[str, StageStatus], context: Context
) -> Iterator[str]:
    """Yield lines of `plan` on conversations, tokens and disk space; warn if space is short."""
    if size.tokens is None:
        work = "An unknown number of conversations (data sets on the Hub have no limit)"
    else:
        work = f"{size.conversations:,} conversations"
        if size.samples > 1:
            work += f", {size.samples} answers to each training prompt"
        if size.is_bound:
            work += f", at most {size.tokens:,} tokens (every answer as long as allowed)"
        else:
            work += f", {size.tokens:,} tokens"
    free = free_disk(context.run.store)
    yield f"\n{work}, {_states_of_tokens(size)}; {decimal(free)} of disk space are free."
    if size.row_layers and size.bytes_per_position:
        layers = "one layer" if size.row_layers == 1 else f"{size.row_layers} layers"
        yield (
            f"The states include outputs of {layers} at every token, prompts"
            f" included: {size.bytes_per_position:,} bytes of each, about"
            f" {decimal(size.layer_bytes)} per layer."
        )
    missing = size.disk_bytes or 0
    for name in CACHES:
        stage = statuses.get(name)
        if stage is not None and stage.directory is not None and stage.made:
            missing -= sum(path.stat().st_size for path in stage.directory.parquet_files())
    is_done = all(statuses[name].status == "done" for name in CACHES if name in statuses)
    if not is_done and missing > free:
        yield "! The states do not fit on the disk: set a larger run.store, or limit seeds.sources."


def _states_of_tokens(size: RunSize) -> str:
    """Return the bytes of cached states per token and in all, as part of a line of `plan`."""
    if size.bytes_per_position is None:
        return "states of unknown size (the target's configuration cannot be read)"
    if not size.bytes_per_position:
        return "no states to cache"
    need = f"{size.bytes_per_position:,} bytes of states per token"
    return need if size.disk_bytes is None else f"{need}, {decimal(size.disk_bytes)}"


def _training_lines(size: RunSize) -> Iterator[str]:
    """Yield lines of `plan` on the optimizer steps of training; warn if they are too few."""
    for recipe in size.recipes:
        bound = "at most" if size.is_bound else "about"
        yield f"Training: {bound} {recipe.total_steps:,} steps: {recipe.describe()}."
    too_few = too_few_steps(size.recipes) if size.recipes else None
    if too_few:
        yield f"! {too_few}"


def _worker_lines(run: ResolvedRun, unfinished: Sequence[str]) -> Iterator[str]:
    """Yield lines of `plan` on the workers of each stage on this machine.

    There are none if the plan is for a Ray cluster or for other GPUs. Workers of unfinished stages
    that this machine cannot place are what `run` will refuse.
    """
    placement = run.config.placement
    used = set()
    for stage in unfinished:
        used.update(run.sections_of(stage))
    if os.environ.get("RAY_ADDRESS") or placement.gpu_memory_gb:
        return
    for section, wanted in placement.of_stages().items():
        try:
            placed = run.placement(section)
        except EnvironmentFault as error:
            reason = error.what
            if wanted.gpus_per_worker and not run.machine.gpus:
                reason = "this machine has no GPU, and the stage needs one."
            if section in used:
                yield f"! {section}: {reason} `run` will refuse this here."
            continue
        line = (
            f"{section}: {placed.workers} worker(s), {placed.gpus} GPU and {placed.cpus} CPU each"
        )
        most = most_workers(wanted, run.machine)
        if most > placed.workers:
            line += f"; {most} workers fit: set placement.{section}.workers=auto"
        yield line


def _print_memory(console: Console, memory: Sequence[StageMemory]) -> None:
    """Print the estimated memory of a worker of each stage for `plan`, in GiB."""
    rows = []
    for stage in memory:
        cells = [stage.name]
        for part in COLUMNS:
            gib = getattr(stage, part) / GIB
            cells.append(f"{gib:5.1f}" if gib else "")
        device = "?" if stage.device_bytes is None else f"{stage.device_bytes / GIB:5.1f}"
        rows.append([*cells, device])
    console.print(f"\nMemory of one worker on each of its devices, an estimate, ±{TOLERANCE:.0%}:")
    print_grid(console, ("GiB", *COLUMNS.values(), "there is"), rows)
