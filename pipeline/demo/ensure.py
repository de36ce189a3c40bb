"""The demo's target: trained from the seeds' train split once, and again when the seeds change."""

from __future__ import annotations

import shutil
from pathlib import Path

from rich.console import Console
from transformers.utils import logging

from pipeline.artifacts.seed_rows import read_seeds
from pipeline.config import Config
from pipeline.demo.target import NUM_STEPS, train_demo_target
from pipeline.execution.progress import Meter, duration
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.run_directory import RunDirectory

MARK = "demo_target.json"  # marks a demo target and names the seeds it was trained on


def ensure_demo_target(run: RunDirectory, config: Config) -> None:
    """Train the target at `target.model`, unless it exists already or is not a demo target."""
    directory = Path(config.target.model)
    seeds = run.latest("seeds")
    assert seeds is not None, "the demo target is trained from the seeds stage"
    made_from = {"seeds": seeds.content, "seed": config.run.seed}
    mark = read_json(directory / MARK)
    if directory.exists() and (mark is None or mark["made_from"] == made_from):
        return
    shutil.rmtree(directory, ignore_errors=True)
    console = Console()
    logging.disable_progress_bar()
    with Meter(console, "target", NUM_STEPS, unit="steps") as meter:
        facts = train_demo_target(
            list(read_seeds(seeds.shards(), "train")),
            directory,
            seed=config.run.seed,
            progress=lambda step, total, loss: meter.update(step, f"loss {loss:.2f}"),
        )
    write_json(directory / MARK, {"made_from": made_from, **facts})
    parameters = f"{facts['parameters'] / 1e6:.1f}M parameters, {facts['steps']} steps, loss {facts['final_loss']:.2f}"
    console.print(f"[green]✓[/] {'target':<10} {duration(facts['seconds']):<10} {parameters}", highlight=False)
