"""Gain and cost of each training method (the paper's table 2, on a small scale): the same target, text and tokens.

    python -m benchmarks.run methods                               # the demo's target, after `make demo`: 7 minutes
    python -m benchmarks.methods CONFIG [section.key=value ...]    # any other; only printed

Runs the flow once per method, all in one store, so that target, seeds, text and cached states are the same, and reads
the reports. `hard labels` is the joint recipe with cross entropy in the place of KL. All learn from as many tokens: the
two stages share the epochs, an even number of them. All trees have the same number of nodes. A tuned backbone's answers
differ from the original's and may be easier or harder to predict, so the rate that calibrate expects on held-out text,
the same text for all, compares heads better than a rate on few prompts. KL, perplexity and agreement compare the tuned
backbone with the original on held-out text. A run whose check fails, because its backbone has drifted too far, is
reported like any other.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.claims import Claim, Result
from benchmarks.results import one_line
from pipeline.cli.app import ends_well
from pipeline.config.load import load_config
from pipeline.errors import CheckFailed, ConfigError
from pipeline.flow import run_flow
from pipeline.storage.atomic import read_json

DEMO = targets.ROOT / "configs" / "demo-medusa-2.yaml"
METHODS = {
    "Medusa-1": ("method=medusa-1",),
    "Medusa-2, joint": ("method=medusa-2", "backbone.recipe=joint", "backbone.loss=kl"),
    "Medusa-2, two-stage": ("method=medusa-2", "backbone.recipe=two-stage", "backbone.loss=kl"),
    "hard labels": ("method=medusa-2", "backbone.recipe=joint", "backbone.loss=ce"),
}
SETTINGS = ("calibrate.nodes=16", "check.engines=[native]", "check.baselines=[]", "check.min_acceleration_rate=0")
FEW = (
    "seeds.sources=[{path: data/seeds.sharegpt.jsonl, limit: 24}]",
    "seeds.holdout=0.3",
    "generate.engine=transformers",
    "generate.max_new_tokens=16",
    "generate.rounds=1",
    "train.epochs=1",
    "train.warmup_steps=1",
    "check.prompts=2",
    "check.max_new_tokens=8",
    "check.studies=[]",
    "limits.max_quarantine_fraction=1",
)


def measure(*, tiny: bool = False) -> Result:
    """The demo's target, with its own configuration."""
    if not tiny:
        return compare(DEMO, [])
    with tempfile.TemporaryDirectory() as temporary:
        target = targets.random_demo_target(Path(temporary) / "target").model
        return compare(
            DEMO, [f"run.root={temporary}", f"run.store={temporary}/store", f"target.model={target}", *FEW], "inline"
        )


def compare(config: Path, overrides: Sequence[str], executor: str = "ray") -> Result:
    """Each method's acceleration rate and the drift of its backbone."""
    claims, facts = [], {}
    epochs = load_config(config, [*SETTINGS, *overrides]).train.epochs
    for number, (name, recipe) in enumerate(METHODS.items(), start=1):
        settings = [f"epochs={max(1, epochs // 2) if 'backbone.recipe=two-stage' in recipe else epochs}", *recipe]
        report = report_of(config, [*SETTINGS, *overrides, *(f"train.{key}" for key in settings)], number, executor)
        native, train = report["check"]["native"], report["train"]
        drift = train.get("drift", {"kl": 0.0, "perplexity_change": 0.0, "greedy_agreement": 1.0})
        sides = {
            "expected, all on the same held-out text": report["tree"]["expected_acceleration_rate"],
            "KL, nats": drift["kl"],
            "perplexity change, %": 100 * drift["perplexity_change"],
            "greedy agreement, %": 100 * drift["greedy_agreement"],
            "top-1 of head 0, %": 100 * report["heads"][0]["top1"],
        }
        claims.append(Claim(f"acceleration rate, {name}", native["acceleration_rate"], sides=sides))
        facts[name] = {"train": train, "heads": report["heads"], "greedy_match": native["greedy_match"]}
    return Result(claims, facts)


def report_of(config: Path, overrides: Sequence[str], number: int, executor: str) -> dict[str, Any]:
    """A run's report, also where its check fails."""
    settings = load_config(config, overrides)
    store = settings.run.store or settings.run.directory
    run = settings.run.model_copy(update={"name": f"{settings.run.name}-method-{number}", "store": store})
    settings = settings.model_copy(update={"run": run})
    try:
        run_flow(settings, executor=executor)
    except CheckFailed as failure:
        print(failure, file=sys.stderr)
    return read_json(run.directory / "report.json") or {}


def main(arguments: Sequence[str]) -> None:
    """Compare the methods on another target and print the result."""
    if not arguments:
        raise ConfigError("Name a configuration.", "benchmarks.methods", f"{DEMO} is one.")
    for claim in compare(Path(arguments[0]), arguments[1:]).claims:
        print(one_line(claim))


if __name__ == "__main__":
    sys.exit(ends_well(lambda: main(sys.argv[1:])))
