"""Benchmark of the hyperparameters that `auto` chooses over the best recipe of a grid.

Claim: the acceleration rate is within 3 % of the best, for any target and amount of data.

    python -m benchmarks.run recipe                                 # the demo's target and text
    python -m benchmarks.recipe CONFIG ... [section.key=value ...]  # other targets; only printed

For each configuration the flow runs until the states are cached. Then heads of each kind learn from
some of the states, by every recipe of the grid and by `auto`. Two rates are measured on the same
held-out text: with a searched tree of 63 nodes (each half of the conversations is evaluated with
the other half's tree), and with the top-1 chain. The best of the grid may be above `auto` by
chance, since rates are noisy. With three heads and bounded data the benchmark ends within an hour
on two cores.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import targets
from benchmarks.claims import Claim, Result
from benchmarks.results import one_line
from examples.demo_target.target import ensure_demo_target
from pipeline.artifacts.feature_rows import FeatureRows
from pipeline.artifacts.trained_heads import HEADS_FILE
from pipeline.cli.ending import ends_well
from pipeline.config import Config, TrainConfig
from pipeline.config.load import load_config
from pipeline.decoding.held_out import HeldOutRanks, replay
from pipeline.decoding.tree_search import CrossFit
from pipeline.errors import ConfigError
from pipeline.execution.progress import ProgressReporter
from pipeline.flow import run_flow
from pipeline.heads.kinds import head_kind
from pipeline.storage.run_directory import RunDirectory
from pipeline.targets.spec import model_config, resolve
from pipeline.training.heads_only import HeadsLearner, num_positions
from pipeline.training.held_out_accuracy import HeldOutText, held_out_ranks
from pipeline.training.methods import METHODS
from pipeline.training.task import TrainSpec, Workers
from pipeline.training.trainer import Trainer

AIM = 0.97
DEMO = targets.ROOT / "configs" / "demo.yaml"
AMOUNTS = (2_500, 10_000, 40_000)
KINDS = ("medusa", "recurrent")
PAPER = {
    "epochs": 2,
    "lr": 1e-3,
    "batch_tokens": 16_384,
    "warmup_steps": 40,
}  # the paper's, for any amount of data
GRID = {"batch_tokens": (32, 128, 512), "epochs": (2, 4), "lr": (1e-3, 3e-3, 9e-3)}
NUM_HEADS, NODES, TOP = 3, 63, 10
FEW = (
    "seeds.sources=[{path: data/seeds.sharegpt.jsonl, limit: 24}]",
    "seeds.holdout=0.3",
    "generate.engine=transformers",
    "generate.max_new_tokens=16",
    "generate.rounds=1",
    "limits.max_quarantine_fraction=1",
)


def measure(*, tiny: bool = False) -> Result:
    """Compare `auto` with the grid on the demo's target."""
    if not tiny:
        return compare([load_config(DEMO)])
    with tempfile.TemporaryDirectory() as temporary:
        target = targets.random_demo_target(Path(temporary) / "target").model
        config = load_config(DEMO, [f"run.root={temporary}", f"target.model={target}", *FEW])
        return compare(
            [config], amounts=(100,), grid={"epochs": (1,), "lr": (1e-3,)}, executor="inline"
        )


def compare(
    configs: Sequence[Config],
    amounts: Sequence[int] = AMOUNTS,
    grid: Mapping[str, Sequence[Any]] = GRID,
    executor: str = "ray",
) -> Result:
    """Compare `auto` with the best of the grid, by target, kind of heads and amount of data."""
    claims, facts = [], []
    recipes = {"auto": {}, "the paper's": PAPER} | {
        _name(recipe): recipe for recipe in _recipes(grid)
    }
    for config in configs:
        run = cached(config, executor)
        for kind, amount in itertools.product(KINDS, amounts):
            found = {}
            for name, recipe in recipes.items():
                found[name] = learned(run, config, kind, amount, recipe)
                rates = f"tree {found[name]['tree']:.3f}, chain {found[name]['chain']:.3f}"
                print(f"{kind}, {amount:,} positions, {name}: {rates}", flush=True)
            where = (
                f"{Path(config.target.model).name}, {kind}, {found['auto']['positions']:,}"
                " positions"
            )
            facts.append({"where": where, "recipes": found})
            claims += [_claim(figure, where, found) for figure in ("tree", "chain")]
    return Result(claims, {"cells": facts, "heads": NUM_HEADS, "nodes": NODES})


def _recipes(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _name(recipe: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in recipe.items())


def _claim(figure: str, where: str, found: Mapping[str, Mapping[str, Any]]) -> Claim:
    auto, paper, *others = found
    best = max(others, key=lambda name: found[name][figure])
    sides = {name: found[name][figure] for name in (auto, best, paper)}
    return Claim(
        f"auto over the best, {figure}, {where}", sides[auto] / sides[best], aim=AIM, sides=sides
    )


def cached(config: Config, executor: str) -> RunDirectory:
    """Train the demo target if it is missing, then run the flow until the states are cached."""
    if Path(config.target.model) == targets.DEMO_TARGET:
        ensure_demo_target(run_flow(config, until="seeds", executor="inline"), config)
    return run_flow(config, until="features", executor=executor)


def learned(
    run: RunDirectory, config: Config, kind: str, amount: int, recipe: Mapping[str, Any]
) -> dict[str, Any]:
    """Train heads by a recipe on the first `amount` cached positions; return rates and losses."""
    features = run.latest("features")
    assert features is not None
    target = resolve(config.target, on_gpu=False)
    sizes = model_config(target).get_text_config()
    settings = TrainConfig(heads=kind, num_heads=NUM_HEADS, checkpoint_every=10**9, **recipe)
    shards = tuple(features.shards())
    with tempfile.TemporaryDirectory() as directory, torch.random.fork_rng():
        spec = TrainSpec(
            shards=shards,
            fingerprint=features.fingerprint,
            settings=settings,
            kind=head_kind(kind),
            phases=METHODS[settings.method].phases(settings),
            target=target,
            hidden_size=sizes.hidden_size,
            vocab_size=sizes.vocab_size,
            seed=0,
            directory=directory,
            device="cpu",
        )
        torch.manual_seed(spec.seed)
        learner = PartLearner(spec, amount)
        summary = Trainer(learner).run(ProgressReporter()).to_json()
        heads = Path(directory) / HEADS_FILE
        text = HeldOutText(shards, features.fingerprint, heads, settings.roles)
        ranks = held_out_ranks(text, TOP)
    figures = {
        "tree": tree_rate(ranks),
        "chain": replay(ranks, chain(NUM_HEADS)).acceleration_rate,
    }
    losses = [head["loss"] for head in summary["held_out"]]
    kept = ("steps", "best_step", "seconds", "hyperparameters")
    return (
        figures
        | {"positions": num_positions(learner.rows), "losses": losses}
        | {key: summary[key] for key in kept}
    )


def tree_rate(ranks: HeldOutRanks) -> float:
    """Return the cross-fitted acceleration rate of a searched tree of NODES."""
    return CrossFit(ranks, NODES, None).replay(NODES).acceleration_rate


def chain(depth: int) -> list[tuple[int, ...]]:
    """Return the tree of first guesses only, with one node per depth."""
    return [(0,) * length for length in range(1, depth + 1)]


class FirstRows(FeatureRows):
    """Cached feature rows of which the train split has only the first `amount` positions."""

    def __init__(self, rows: FeatureRows, amount: int):
        vars(self).update(vars(rows))
        self._amount = amount

    def lengths(self, split: str) -> list[npt.NDArray[np.int64]]:
        found = super().lengths(split)
        if split != "train":
            return found
        starts = np.cumsum([0, *(int(each.sum()) for each in found)])
        return [
            np.where(start + np.cumsum(each) <= self._amount, each, 0)
            for start, each in zip(starts, found, strict=False)
        ]


class PartLearner(HeadsLearner):
    """The learner of heads from the first `amount` positions of the feature cache."""

    def __init__(self, spec: TrainSpec, amount: int):
        super().__init__(spec, Workers(), torch.device("cpu"))
        whole = num_positions(self.rows)
        self.rows = FirstRows(self.rows, amount)
        self.held_out_share *= whole / num_positions(self.rows)
        self.recipe = spec.recipe(num_positions(self.rows))
        self.peak_lrs = {"heads": self.recipe.lr}


def main(arguments: Sequence[str]) -> None:
    """Compare `auto` with the grid on other targets, and print the claims."""
    files = [word for word in arguments if "=" not in word]
    if not files:
        raise ConfigError("Name a configuration.", "benchmarks.recipe", f"{DEMO} is one.")
    overrides = [word for word in arguments if "=" in word]
    for claim in compare(
        [load_config(file, overrides) for file in files], executor="inline"
    ).claims:
        print(one_line(claim))


if __name__ == "__main__":
    sys.exit(ends_well(lambda: main(sys.argv[1:])))
