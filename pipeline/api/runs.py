"""Run a flow, or open a run and read its results, in Python. See docs/python.md.

Errors that are meant for the user are `MedusaDistillError`s.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline import flow
from pipeline.api.models import GivenTree, load_tree
from pipeline.artifacts.generated_rows import TokenRow, read_token_rows
from pipeline.artifacts.seed_rows import read_seeds
from pipeline.artifacts.trained_heads import HEADS_FILE, read_trained_heads
from pipeline.artifacts.tree_file import read_calibration
from pipeline.config import Config
from pipeline.conversations.conversation import Conversation
from pipeline.decoding.dynamic_tree import DynamicTree, check_tree
from pipeline.decoding.held_out import replay, replay_dynamic
from pipeline.decoding.tree import TreePath
from pipeline.errors import DataError
from pipeline.heads.kind import Heads
from pipeline.heads.kinds import max_tree_depth
from pipeline.storage.run_directory import RunDirectory
from pipeline.training.held_out_accuracy import HeldOutText, held_out_places, held_out_ranks


def run_flow(
    config: Config,
    *,
    until: str | None = None,
    executor: str = "ray",
    fresh: str | None = None,
    quiet: bool = False,
) -> Run:
    """Run the unfinished stages of a flow in order, and return the run.

    Args:
        config: From `load_config`.
        until: Stop after this stage.
        executor: `ray`, or `inline` for everything in this process.
        fresh: Discard this stage's result and run it again.
        quiet: Print nothing.

    Raises:
        MedusaDistillError: The configuration is refused, or a stage or its check fails. Committed
            results are kept, and the same call continues.
    """
    console = Console(quiet=True) if quiet else None
    directory = flow.run_flow(config, until=until, executor=executor, fresh=fresh, console=console)
    return Run(directory, config)


def open_run(path: str | Path) -> Run:
    """Open a run directory, also a copied one, to read its results.

    Raises:
        ConfigError: The directory is not a run directory.
    """
    return Run(*RunDirectory.open(Path(path)))


@dataclass(frozen=True)
class Run:
    """An opened run directory.

    Methods read the current result of a stage. They raise DataError if the run has not finished
    that stage.
    """

    directory: RunDirectory
    config: Config

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory.path

    @property
    def report(self) -> dict[str, Any]:
        """The content of the run's report.json.

        Raises DataError if the run has no report.
        """
        try:
            return json.loads((self.path / "report.json").read_bytes())
        except FileNotFoundError:
            raise DataError(
                "This run has no report.",
                self.path,
                "Run the check stage, which writes the report.",
            ) from None

    @property
    def export(self) -> Path:
        """The run's export directory, which engines load."""
        return self._stage("export").path

    def shards(self, stage: str) -> list[Path]:
        """List the Parquet files of a stage in order.

        The stage is `seeds`, `generate` or `features`.
        """
        return self._stage(stage).shards()

    def conversations(self, split: str) -> Iterator[Conversation]:
        """Iterate over the seed conversations of a split.

        The split is `train`, `calibrate` or `check`.
        """
        return read_seeds(self.shards("seeds"), split)

    def generated(self, split: str | None = None) -> Iterator[TokenRow]:
        """Iterate over the generated rows of a split, or of all splits for None.

        A row has token ids and the spans that the target wrote.
        """
        stage = self._stage("generate")
        rows = read_token_rows(stage.shards(), stage.fingerprint)
        return (row for row in rows if split in (None, row.split))

    def heads(self) -> Heads:
        """Load the run's trained heads on the CPU."""
        return read_trained_heads(self._stage("train").path / HEADS_FILE)

    def tree(self) -> tuple[TreePath, ...] | DynamicTree:
        """Return the tree that calibrate chose: its paths, or a `DynamicTree`."""
        return read_calibration(self._stage("calibrate").path).tree

    def simulated_acceleration_rate(self, tree: GivenTree) -> float:
        """Simulate the acceleration rate of a tree on held-out text.

        Nothing is decoded: the trained heads run once, on the CPU, over a sample of the run's
        cached held-out states. The rate is NaN if there are none.

        Raises:
            ConfigError: The tree does not fit the run's heads.
            DataError: The tree's file cannot be read, or a stage is not finished.
        """
        settings = self.config
        states, *_ = flow.STAGES["calibrate"].upstream(settings)
        features, heads = self._stage(states), self._stage("train").path / HEADS_FILE
        top, depth = settings.calibrate.top, max_tree_depth(settings.train)
        chosen = check_tree(load_tree(tree), depth, top)
        shards = tuple(features.shards())
        text = HeldOutText(shards, features.fingerprint, heads, settings.train.roles)
        if isinstance(chosen, DynamicTree):
            places = held_out_places(text, chosen)
            return replay_dynamic(places, chosen.num_nodes).acceleration_rate
        return replay(held_out_ranks(text, top), chosen).acceleration_rate

    def accuracies(self) -> list[list[float]]:
        """Return how often the r-th guess of each head is right, as shares, `[heads][ranks]`.

        They were measured by calibrate, on held-out rows.
        """
        return read_calibration(self._stage("calibrate").path).accuracies

    def _stage(self, name: str) -> Any:
        """Return the directory of a finished stage; raise DataError if it is not finished."""
        stage = self.directory.latest(name)
        if stage is None or not stage.done:
            raise DataError(
                f"This run has no finished {name} stage.",
                self.path,
                f"Run it: medusa-distill run {self.path}",
            )
        return stage
