"""Benchmark of supported model families in miniature, through the flow and in vLLM.

    python -m benchmarks.run architectures    # docs/models.md, both kinds of heads: 10 minutes

A family is supported if the whole flow passes its own check natively. For vLLM the table has the
number of greedy texts that are the same with the export as without it, or why vLLM does not start.
Weights are random and sizes tiny, so rates mean nothing here. A family is refused if its layers
cannot verify a tree; the flow reports this before it computes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import targets
from benchmarks.claims import Claim, Result
from benchmarks.families import FAMILIES, REFUSED, save_family, save_refused
from pipeline.api.runs import Run, run_flow
from pipeline.config import Config
from pipeline.config.load import validate
from pipeline.errors import MedusaDistillError
from pipeline.evaluation.prompts import held_out_prompts
from pipeline.export.layout import read_layout
from pipeline.targets.spec import TargetSpec, context_length, resolve
from pipeline.targets.vllm_decode import DecodeTask, decode_in_vllm

KINDS = ("recurrent", "medusa")
NUM_PROMPTS, NEW_TOKENS = 4, 12


def measure(*, tiny: bool = False) -> Result:
    """Run the flow on every family; if `tiny`, on one supported and one refused, without vLLM."""
    families = list(FAMILIES)[:1] if tiny else list(FAMILIES)
    found = {name: kept(name, in_vllm=not tiny) for name in families}
    found |= {name: refused(name) for name in (list(REFUSED)[:1] if tiny else REFUSED)}
    whole = sum(row["flow"] == "kept" for row in found.values())
    sides = {
        "refused before anything was computed": sum(
            row["flow"].startswith("refused") for row in found.values()
        )
    }
    return Result(
        [Claim("families that run from seeds to an exact check", whole, "", sides=sides)],
        {"families": found},
    )


def kept(name: str, *, in_vllm: bool) -> dict[str, Any]:
    """Return a supported family's row: the flow's result and, by kind of heads, vLLM's."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        target = save_family(name, root / "target")
        row: dict[str, Any] = {"flow": "kept"}
        try:
            runs = {heads: _run(_config(name, root, target, heads)) for heads in KINDS}
        except MedusaDistillError as error:
            return {"flow": f"failed: {error.what}"}
        for heads, run in runs.items():
            match = run.report["check"]["native"]["greedy_match"]
            row[f"{heads}, native"] = f"{match['identical']} of {match['sequences']}"
        like = FAMILIES[name].served_as
        served = (
            _served(runs)
            if in_vllm and not like
            else dict.fromkeys(runs, f"as {like}" if like else "not tried")
        )
        row |= {f"{heads}, vLLM": said for heads, said in served.items()}
        print(name, row, flush=True)
        return row


def refused(name: str) -> dict[str, Any]:
    """Return a refused family's row: the flow's error, and the files that the flow wrote."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        config = _config(name, root, save_refused(name, root / "target"), "recurrent")
        try:
            _run(config)
        except MedusaDistillError as error:
            made = sorted(path.name for path in root.iterdir() if path.name != "target")
            return {"flow": f"refused: {error.what}", "made": made}
        return {"flow": "kept"}


def _config(name: str, root: Path, target: Path, heads: str) -> Config:
    family = FAMILIES.get(name)
    arguments = {"template_arguments": family.arguments} if family and family.arguments else {}
    return validate(
        {
            "run": {"name": heads, "root": str(root), "store": str(root / "store")},
            "target": {"model": str(target), **arguments},
            "seeds": {
                "sources": [{"path": str(targets.ROOT / "data/seeds.sharegpt.jsonl"), "limit": 32}],
                "holdout": 0.5,
            },
            "generate": {"engine": "transformers", "max_new_tokens": 8, "rounds": 1},
            "train": {
                "heads": heads,
                "num_heads": 3,
                "epochs": 1,
                "batch_tokens": 128,
                "warmup_steps": 1,
                "lr": 1e-2,
            },
            "calibrate": {"nodes": 4},
            "check": {
                "prompts": NUM_PROMPTS,
                "max_new_tokens": NEW_TOKENS,
                "engines": ["native"],
                "repeats": 1,
                "baselines": [],
                "min_acceleration_rate": 0,
            },
            "limits": {"min_free_disk_gb": 0, "max_quarantine_fraction": 1},
        },
        name,
    )


def _run(config: Config) -> Run:
    return run_flow(config, executor="inline", quiet=True)


def _served(runs: Mapping[str, Run]) -> dict[str, str]:
    """Compare greedy texts of vLLM with and without heads; describe the result by kind of heads.

    If vLLM fails, each kind of heads is tried alone, and the result says whether vLLM starts.
    """
    first = next(iter(runs.values()))
    target = resolve(first.config.target, on_gpu=False)
    found = held_out_prompts(
        first.generated("check"), NUM_PROMPTS, context_length(target) - 2 * NEW_TOKENS
    )
    prompts: Sequence[list[int]] = [prompt.ids for prompt in found.kept]
    said = {}
    chosen = {
        heads: read_layout(run.export).engine_args(run.export, target.model)
        for heads, run in runs.items()
    }
    try:
        plain, *others = decode_in_vllm(
            [DecodeTask(target, prompts, NEW_TOKENS, args) for args in ({}, *chosen.values())]
        )
    except MedusaDistillError as error:
        return {
            heads: _alone(target, engine_args, prompts, error)
            for heads, engine_args in chosen.items()
        }
    for heads, other in zip(runs, others, strict=True):
        same = sum(one == two for one, two in zip(plain.token_ids, other.token_ids, strict=True))
        said[heads] = f"{same} of {len(prompts)}"
    return said


def _alone(
    target: TargetSpec,
    engine_args: Mapping[str, Any],
    prompts: Sequence[list[int]],
    first: MedusaDistillError,
) -> str:
    """Describe whether vLLM starts with one kind of heads alone; `first` is the error with all."""
    try:
        decode_in_vllm([DecodeTask(target, prompts, NEW_TOKENS, engine_args)])
    except MedusaDistillError as error:
        return f"does not start: {error.what}"
    return f"starts; beside it: {first.what}"
