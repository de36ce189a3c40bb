"""`medusa-distill plan`: what a run would do, and what it would cost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pipeline.cli import plan_tables
from pipeline.config import Config
from pipeline.config.load import load_config
from pipeline.errors import EnvironmentFault
from pipeline.run.estimate import estimate
from pipeline.storage.run_directory import RunDirectory
from pipeline.targets.files import has_weights, is_local, one_look_at_the_hub

if TYPE_CHECKING:
    from pipeline.run.estimate import RunSize
    from pipeline.run.rates import Rates
    from pipeline.run.stage_status import StageStatus

Statuses = dict[str, "StageStatus"]


def plan(
    config: Annotated[Path, typer.Argument(help="A YAML file such as configs/qwen2.5-7b.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, as for run.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Put a few rows through generate, features and train here, for the hours.")
    ] = False,
) -> None:
    """Say which stages would run and which are cached; what they take of memory, disk and time, and what cannot fit.

    Refuses what run would refuse (exit 2, 3 or 4). Starts and writes nothing; of a target on the Hub it fetches the
    configuration alone.
    """
    settings = load_config(config, overrides or ())
    with one_look_at_the_hub(settings.target.model, settings.check.served_model, settings.check.assistant_model):
        _plan(settings, measure=measure)


def _plan(settings: Config, *, measure: bool) -> None:
    from pipeline.flow import STAGES, wanted_stages
    from pipeline.run.preflight import check_config, not_served, unread_settings
    from pipeline.run.stage_status import stage_statuses  # torch and transformers: --help does not wait for them

    notes: list[str] = []
    wanted = wanted_stages(settings, tuple(STAGES))
    check_config(settings, wanted, notes=None if measure else notes)
    if is_local(settings.target.model) and not has_weights(settings.target.model):
        notes.append("The target's directory holds no weights: sizes are its config.json's, and a run would refuse it.")
    run = RunDirectory(settings.run.directory, settings.run.store)
    console = Console(width=None if Console().is_terminal else 120)
    statuses = stage_statuses(run, settings, STAGES)
    plan_tables.print_stages(console, {name: statuses[name] for name in statuses if STAGES[name].asked_for(settings)})
    plan_tables.warn(console, [*unread_settings(settings), *notes])
    figures = estimate(settings, statuses["seeds"].finished, statuses["generate"].finished)
    cached = _cached_bytes(statuses)
    plan_tables.print_size(console, settings, figures, cached, _free_disk(run))
    if drafted := settings.train.draft_vocab:
        served = not_served(settings) or ""
        plan_tables.say(console, f"Draft vocabulary: the {drafted:,} most frequent tokens. {served}".rstrip())
    plan_tables.print_training(console, figures)
    rates = _rates(settings, console) if measure else None
    plan_tables.print_workers(console, settings)
    _print_hours(console, settings, figures, statuses, rates)
    if statuses["features"].status != "done" and (figures.disk_bytes or 0) - cached > _free_disk(run):
        plan_tables.warn(console, ["That does not fit on the disk: name a larger run.store, or fewer rows with limit."])
    _print_memory(console, settings, figures, {name for name, state in statuses.items() if state.status != "done"})


def _print_memory(console: Console, settings: Config, figures: RunSize, unfinished: set[str]) -> None:
    """What stages take of memory; EnvironmentFault where one that is not finished cannot fit."""
    from pipeline.run.budget import budgets, sizes_of
    from pipeline.run.fitting import require_fit

    try:
        sizes = sizes_of(settings)
    except EnvironmentFault:  # the Hub cannot be reached: said above
        return
    if sizes is not None:
        found = budgets(settings, sizes, figures.positions)
        plan_tables.print_memory(console, found)
        plan_tables.print_disk(console, settings, sizes, found)
        require_fit(settings, sizes, [budget for budget in found if budget.placed in unfinished], figures.positions)


def _print_hours(
    console: Console, settings: Config, figures: RunSize, statuses: Statuses, measured: Rates | None
) -> None:
    from pipeline.run.rates import TIMED, hours, rates_of_runs

    rates = rates_of_runs(settings) if measured is None else measured
    open_stages = [name for name in TIMED if name in statuses and statuses[name].status not in ("done", "skipped")]
    workers = plan_tables.workers_of(settings)
    needed = {name: hours(name, rates[name], figures, workers[name]) for name in open_stages if name in rates}
    plan_tables.print_hours(console, open_stages, rates, needed)


def _rates(settings: Config, console: Console) -> Rates:
    from pipeline.cli.measure import measured_rates

    return measured_rates(settings, console)


def _cached_bytes(statuses: Statuses) -> int:
    """What lies on the disk of the states already."""
    state = statuses.get("features")
    if state is None or not state.directory or not state.made:
        return 0
    return sum(path.stat().st_size for path in state.directory.shards())


def _free_disk(run: RunDirectory) -> int:
    return shutil.disk_usage(next(path for path in (run.store, *run.store.parents) if path.exists())).free
