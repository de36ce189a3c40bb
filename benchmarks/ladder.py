"""Benchmark of training recipes on one target: same questions, held-out text and number of nodes.

    python -m benchmarks.run ladder                             # after `make demo`: 20 minutes
    python -m benchmarks.ladder CONFIG [section.key=value ...]  # any other; prints the table
        --results=TARGET    # keep the figures too, as the benchmark `ladder-TARGET`
        --recipe=NAME       # this recipe, and further ones; all by default

The flow runs once per recipe, all in one store, so that target, seeds, text and cached states are
made once; the figures are read from the reports. All recipes of one method learn from the same
number of tokens. Rates are measured by native decoding with a tree of `NODES` nodes, with the
standard error over prompts, and by vLLM with the chain. A tuned backbone's answers differ from the
original's and may be easier or harder to predict. A run whose check fails is in the table too. The
same command continues an interrupted comparison.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.claims import Claim, Result
from benchmarks.run import keep
from pipeline.artifacts.trained_heads import HEADS_FILE, read_trained_heads
from pipeline.cli.ending import ends_well
from pipeline.config.load import load_config
from pipeline.errors import CheckFailed, ConfigError
from pipeline.flow import run_flow
from pipeline.storage.atomic import read_json
from pipeline.storage.run_directory import RunDirectory
from pipeline.targets.spec import model_config, resolve

OPTIONS = ("--results=", "--recipe=")
DEMO = targets.ROOT / "configs" / "demo.yaml"
NODES = 63

BACKBONE = (
    "method=medusa-2", "backbone.lambda_0=0.1", "backbone.lr=1e-3", "backbone.sequence_length=512",
    "backbone.batch_sequences=1", "backbone.gradient_checkpointing=false", "backbone.max_kl=9",
)  # fmt: skip
HARD, SOFT = ("soft_labels=0",), ("soft_labels=0.5",)
RECURRENT = ("heads=recurrent", "lr={recurrent_lr}")
RECIPES: dict[str, tuple[str, ...]] = {
    "Medusa, on the original answers": (*HARD, "generate.mode=passthrough"),
    "Medusa": HARD,
    "Medusa, soft labels": SOFT,
    "Medusa, noise": (*HARD, "noise=0.2"),
    "Medusa, tied": (*HARD, "medusa.lm_head=tied"),
    "Medusa, one shared lm_head": (*HARD, "medusa.lm_head=shared"),
    "Medusa, a draft vocabulary of a quarter": (*HARD, "draft_vocab={quarter}"),
    "recurrent": (*HARD, *RECURRENT),
    "recurrent, soft labels": (*SOFT, *RECURRENT),
    "recurrent, half as wide, soft labels": (
        *SOFT,
        *RECURRENT,
        "recurrent.intermediate_size={narrow}",
    ),
    "Medusa-2, joint": (*HARD, *BACKBONE),
    "Medusa-2, two-stage": (*HARD, *BACKBONE, "backbone.recipe=two-stage"),
    "hard labels for the backbone": (*HARD, *BACKBONE, "backbone.loss=ce"),
    "recurrent, with the backbone": (*HARD, *RECURRENT, *BACKBONE),
}
BASE = (
    "train.heads=medusa", f"calibrate.nodes={NODES}", "check.baselines=[]", "check.repeats=1",
    "check.min_acceleration_rate=0",
)  # fmt: skip
FEW = (
    "seeds.sources=[{path: data/seeds.sharegpt.jsonl, limit: 24}]", "seeds.holdout=0.3",
    "generate.engine=transformers", "generate.max_new_tokens=16", "generate.rounds=1", "train.epochs=1",  # noqa: E501
    "train.warmup_steps=1", "check.prompts=2", "check.max_new_tokens=8", "check.engines=[native]",
    "limits.max_quarantine_fraction=1",
)  # fmt: skip
FEW_RECIPES = ("Medusa", "Medusa-2, joint", "recurrent, soft labels")


def measure(*, tiny: bool = False) -> Result:
    """Compare the recipes on the demo's target, with the demo's configuration."""
    if not tiny:
        return compare(DEMO, ["run.store=runs/demo"])
    with tempfile.TemporaryDirectory() as temporary:
        target = targets.random_demo_target(Path(temporary) / "target").model
        places = (f"run.root={temporary}", f"run.store={temporary}/store", f"target.model={target}")
        return compare(DEMO, [*places, *FEW], FEW_RECIPES)


def compare(
    config: Path, overrides: Sequence[str], names: Sequence[str] = tuple(RECIPES)
) -> Result:
    """Run the flow with each recipe; return a claim of each acceleration rate, and all figures."""
    claims, facts = [], {}
    for name in names:
        row = figures(config, [*BASE, *overrides], name)
        rates = {key: value for key, value in row.items() if isinstance(value, float)}
        claims.append(Claim(f"acceleration rate, {name}", row["native"], sides=rates))
        facts[name] = row
        print(as_row(name, row), flush=True)
    return Result(claims, facts)


def figures(config: Path, overrides: Sequence[str], name: str) -> dict[str, Any]:
    """Run the flow with one recipe and return its figures; those of vLLM may be None."""
    number = list(RECIPES).index(name)
    base = load_config(config, overrides)
    sizes = model_config(resolve(base.target)).get_text_config()
    values = {
        "recurrent_lr": base.train.lr if base.train.lr == "auto" else base.train.lr / 4,
        "narrow": 2 * sizes.hidden_size,
        "quarter": sizes.vocab_size // 4,
    }
    recipe = [setting.format(**values) for setting in RECIPES[name]]
    recipe = [
        setting if setting.startswith("generate.") else f"train.{setting}" for setting in recipe
    ]
    settings = load_config(config, [*overrides, *recipe])
    store = settings.run.store or settings.run.directory
    run = settings.run.model_copy(
        update={"name": f"{settings.run.name}-ladder-{number}", "store": store}
    )
    settings = settings.model_copy(update={"run": run})
    try:
        run_flow(settings, executor="inline")
    except CheckFailed as failure:
        print(failure, file=sys.stderr)
    report = read_json(run.directory / "report.json") or {}
    native, vllm = report["check"]["native"], report["check"].get("vllm", {})
    train = RunDirectory(run.directory).latest("train")
    assert train is not None
    heads = read_trained_heads(train.path / HEADS_FILE)
    return {
        "native": native["acceleration_rate"],
        "standard_error": native.get("standard_error"),
        "speedup": native["speedup"],
        "expected": report["tree"]["expected_acceleration_rate"],
        "vllm": vllm.get("acceleration_rate"),
        "expected_chain": report["tree"]["chain"][report["num_heads"] - 1][
            "expected_acceleration_rate"
        ],
        "draft_tokens": report["tree"]["num_speculative_tokens"],
        "identical": [engine["greedy_match"] for engine in (native, vllm) if engine],
        "parameters": sum(weight.numel() for weight in heads.parameters() if weight.requires_grad),
        "train_seconds": report["seconds_by_stage"]["train"],
        "steps": report["train"].get("steps"),
        "drift": report["train"].get("drift"),
    }


def as_row(name: str, row: Mapping[str, Any]) -> str:
    """Format a recipe's row of the table as Markdown."""
    error = f" ± {row['standard_error']:.2f}" if row["standard_error"] is not None else ""
    vllm = f"{row['vllm']:.2f}" if row["vllm"] is not None else ""
    parameters, seconds = f"{row['parameters'] / 1e6:.2f}M", f"{row['train_seconds']:.0f} s"
    rates = (
        f"{row['native']:.2f}{error} | {row['expected']:.2f} | {vllm} | {row['expected_chain']:.2f}"
    )
    return f"| {name} | {rates} | {parameters} | {seconds} |"


def _given(option: str, arguments: Sequence[str]) -> list[str]:
    return [word.removeprefix(option) for word in arguments if word.startswith(option)]


def main(arguments: Sequence[str]) -> None:
    """Compare the recipes on another target; print the table."""
    config, *overrides = [word for word in arguments if not word.startswith(OPTIONS)] or [""]
    if not config:
        raise ConfigError("Name a configuration.", "benchmarks.ladder", f"{DEMO} is one.")
    recipes = _given("--recipe=", arguments) or list(RECIPES)
    if unknown := [name for name in recipes if name not in RECIPES]:
        raise ConfigError(
            f"There is no recipe '{unknown[0]}'.", "--recipe", f"There are: {'; '.join(RECIPES)}."
        )
    started = time.perf_counter()
    result = compare(Path(config), overrides, recipes)
    for target in _given("--results=", arguments):
        keep(f"ladder-{target}", result, time.perf_counter() - started)
    found = result.facts
    print(
        "\n| recipe | native | expected | vLLM | expected chain | trained parameters | training |"
    )
    print("|---|---|---|---|---|---|---|")
    print("\n".join(as_row(name, row) for name, row in found.items()))


if __name__ == "__main__":
    sys.exit(ends_well(lambda: main(sys.argv[1:])))
