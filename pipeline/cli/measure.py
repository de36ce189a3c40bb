"""`plan --measure`: a few rows through generate, features and train on this machine, for the time that a run takes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from pipeline.config import Config
from pipeline.config.load import validate
from pipeline.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from pipeline.run.rates import Rate

ROWS = 40  # of which 16 are held out
NEW_TOKENS = 256
EPOCHS = 8  # so that the first step, which is slower, counts little


def measured_rates(config: Config, console: Console) -> dict[str, Rate]:
    """The rate of each stage that a run would have, of one worker each; what is made is thrown away.

    Few rows keep an engine less busy than many do, so a run is faster than this.

    Raises:
        MedusaDistillError: What the run of these rows raises, with its exit code.
    """
    from pipeline.flow import run_flow
    from pipeline.run.rates import TIMED, rates_in

    console.print(f"\nMeasuring with {ROWS} conversations on one worker …", highlight=False)
    with tempfile.TemporaryDirectory(prefix="medusa-distill-plan-") as directory:
        few = small_run(config, Path(directory))
        run = run_flow(few, until="train", executor="inline", console=Console(quiet=True))
        return dict(rates_in(_summaries(run, TIMED), f"measured here with {ROWS} conversations"))


def small_run(config: Config, root: Path) -> Config:
    """The same run of a few rows and short answers, in a directory of its own."""
    settings: dict[str, Any] = config.model_dump(mode="json")
    settings["run"] |= {"name": "measure", "root": str(root), "store": None}
    settings["seeds"]["sources"] = [{**settings["seeds"]["sources"][0], "limit": ROWS}]
    settings["generate"] |= {"max_new_tokens": min(NEW_TOKENS, config.generate.max_new_tokens), "rounds": 1}
    settings["train"] |= {"epochs": EPOCHS, "patience": EPOCHS}
    settings["limits"] |= {"max_quarantine_fraction": 1.0}
    settings["push"] |= {"repo_id": None}
    for placed in ("generate", "features", "train"):
        settings["placement"][placed]["workers"] = 1
    return validate(settings, "plan --measure")


def _summaries(run: RunDirectory, stages: tuple[str, ...]) -> dict[str, Any]:
    found = {name: run.latest(name) for name in stages}
    return {name: stage.summary for name, stage in found.items() if stage and stage.done}
