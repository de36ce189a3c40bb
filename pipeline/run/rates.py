"""How fast this machine was: each stage's tokens per second in earlier runs on the same hardware, and hours from them.

A rate is of one worker, without loading the model. That of training is of the learned positions, by all its workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.execution.hardware import hardware
from pipeline.heads.shape import drafter
from pipeline.run.estimate import RunSize
from pipeline.storage.atomic import read_object

TIMED = ("generate", "features", "train")


@dataclass(frozen=True)
class Rate:
    """Tokens per second that are written, cached or learned from, and how they are known."""

    tokens_per_second: float
    source: str


Rates = Mapping[str, Rate]


def rates_of_runs(config: Config) -> dict[str, Rate]:
    """Rates of runs in `run.root` of the same target on hardware as here, the newest of each stage.

    That of training is of the same method, and of as many heads of the kind.
    """
    here, found = hardware(), {}
    trained = (config.train.method, drafter(config.train))
    reports = config.run.root.glob("*/report.json")
    for path in sorted(reports, key=lambda path: path.stat().st_mtime):
        report = read_object(path)
        same = report.get("target") == config.target.model and report.get("hardware") == here
        for stage, rate in rates_in(report, f"of run {path.parent.name}") if same else ():
            if stage != "train" or (report.get("method"), report.get("drafter")) == trained:
                found[stage] = rate
    return found


def rates_in(summaries: Mapping[str, Any], source: str) -> Iterator[tuple[str, Rate]]:
    """The rates in stages' summaries, or in a report; features' is of positions, not of all that is read."""
    for stage in TIMED:
        summary = summaries.get(stage) or {}
        speed = summary.get("tokens_per_second")
        if not speed:
            continue
        if stage == "features":
            speed *= summary["positions"] / summary["tokens"]
        yield stage, Rate(speed, source)


def hours(stage: str, rate: Rate, figures: RunSize, workers: int) -> float | None:
    """How long a stage takes at this rate; None while the number of tokens is unknown."""
    if figures.tokens is None:
        return None
    if stage == "train":
        tokens = sum(recipe.epochs * recipe.steps_per_epoch * recipe.batch_tokens for recipe in figures.recipes)
        return tokens / rate.tokens_per_second / 3600
    return figures.tokens / (rate.tokens_per_second * workers) / 3600
