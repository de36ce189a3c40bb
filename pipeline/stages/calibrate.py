"""calibrate: how often each head's guesses are right on held-out rows, and the tree that makes the most of them.

Promises: accuracies come from the `calibrate` split alone, which nothing was trained on; the tree grows greedily by
the product of accuracies (paper 2.3.3), or is the user's own when `calibrate.choices` names one.
"""

from __future__ import annotations

from typing import Any

from pipeline.errors import DataError
from pipeline.execution.context import Context
from pipeline.execution.preflight import read_choices
from pipeline.medusa.accuracy import rank_accuracies
from pipeline.medusa.tree import expected_acceleration_rate, greedy_tree, path_probability
from pipeline.storage.durable import write_json
from pipeline.storage.stage_directory import StageDirectory
from pipeline.training.evaluate import held_out_hits

NAME = "calibrate"
VERSION = 1
UPSTREAM = ("features", "train")

REPORTED_TOPS = 5


def identity(context: Context) -> dict[str, Any]:
    """The budget, or the content of the user's tree."""
    settings = context.config.calibrate
    choices = read_choices(context.config) if settings.choices else None
    return {"nodes": settings.nodes, "depth": settings.depth, "top": settings.top, "choices": choices}


def run(context: Context, stage: StageDirectory) -> dict[str, Any]:
    """Measure the heads and search the tree."""
    features, train = context.upstream["features"], context.upstream["train"]
    settings, trained = context.config.calibrate, context.config.train
    placement = context.placement("train")
    arguments = {
        "shards": tuple(map(str, features.shards())),
        "fingerprint": features.fingerprint,
        "heads": str(train.path / "heads.safetensors"),
        "roles": trained.roles,
        "top": settings.top,
        "device": "cuda" if placement.gpus else "cpu",
    }
    hits_KR, counts_K = context.executor.call(held_out_hits, arguments, placement)
    if int(counts_K.min()) == 0:
        raise DataError(
            f"Head {int(counts_K.argmin())} has nothing to be measured on: the held-out answers are too short for it.",
            str(features.path),
            "Train fewer heads (train.num_heads), hold out more rows (seeds.holdout) or let answers be longer.",
        )
    accuracy_KR = rank_accuracies(hits_KR, counts_K)
    searched = not settings.choices
    choices = greedy_tree(accuracy_KR, settings.nodes, settings.depth) if searched else read_choices(context.config)
    choices = choices or ((0,),)  # heads that are never right
    probabilities = [path_probability(accuracy_KR, path) for path in choices]
    expected = expected_acceleration_rate(accuracy_KR, choices)
    tree = {
        "choices": [list(path) for path in choices],
        "probabilities": probabilities,
        "accuracies": accuracy_KR,
        "expected_acceleration_rate": expected,
    }
    write_json(stage.path / "tree.json", tree)
    return {
        "heads": [_head(hits, int(count)) for hits, count in zip(hits_KR.tolist(), counts_K, strict=True)],
        "tree": {
            "nodes": len(choices),
            "depth": max(map(len, choices)),
            "source": "searched" if searched else "calibrate.choices",
            "expected_acceleration_rate": round(expected, 4),
        },
        "positions": int(counts_K.max()),
    }


def one_line(summary: dict[str, Any]) -> str:
    tree = summary["tree"]
    accuracies = " ".join(f"{head['top1']:.0%}" for head in summary["heads"])
    rate = tree["expected_acceleration_rate"]
    return f"top-1 {accuracies}; a tree of {tree['nodes']} nodes, expected acceleration rate {rate:.2f}"


def _head(hits_R: list[int], count: int) -> dict[str, Any]:
    """top1 to top5 and how many labels they were measured on."""
    tops = {f"top{rank + 1}": round(hits / count, 4) for rank, hits in enumerate(hits_R[:REPORTED_TOPS])}
    return {**tops, "labels": count}
