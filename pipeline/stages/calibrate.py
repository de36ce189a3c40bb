"""calibrate: each head's accuracy on held-out rows, and the tree with the highest expected speedup.

Promises: everything is measured on the `calibrate` split, which nothing is trained on. Two trees are searched greedily
on one half of it: by the product of accuracies (paper 2.3.3), and by the frequency of whole paths. The other half
chooses the search with the higher acceleration rate and gives the expected rate; that search is repeated on both
halves. With `calibrate.nodes: auto` the size with the highest speedup is used, by the overhead of each size measured on
this device; among sizes within 5 % of it the acceleration rate counts too. `calibrate.choices` gives a tree instead.
Where training tuned the backbone, the states are those of the `tuned-features` stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.trained_heads import HEADS_FILE, load_heads
from pipeline.artifacts.tree_file import Calibration, Search
from pipeline.config import Config
from pipeline.decoding.tree import TreePath
from pipeline.decoding.tree_search import (
    HeldOutRanks,
    choose_tree,
    path_frequencies,
    rank_accuracies,
    search_trees,
    simulated_acceleration_rate,
)
from pipeline.errors import DataError
from pipeline.evaluation.overhead import NUM_PROMPTS, NUM_STEPS, overhead_curve
from pipeline.evaluation.prompts import held_out_prompts
from pipeline.evaluation.tree_studies import STOCK_NODES
from pipeline.run.context import Context
from pipeline.run.preflight import read_choices
from pipeline.run.stage import Stage
from pipeline.storage.done import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import TargetSpec, context_length
from pipeline.training.evaluation import SPLIT, held_out_ranks
from pipeline.training.methods import method_of

NAME = "calibrate"
VERSION = 5

REPORTED_TOPS = 5
MEASURED_SIZES = (1, 3, 7, 15, 31, 63, 127, 255)  # with the root powers of two, which matrix products are fastest at


def upstream(config: Config) -> tuple[str, ...]:
    """The states that the heads are measured on: the cached ones, or those of the tuned backbone."""
    return ("tuned-features" if method_of(config.train).tunes_backbone else "features", "train")


def identity(context: Context) -> Identity:
    """The budget, or the content of the user's tree."""
    settings = context.config.calibrate
    choices = read_choices(context.config) if settings.choices else None
    return {"nodes": settings.nodes, "depth": settings.depth, "top": settings.top, "choices": choices}


def run(context: Context, stage: StageDirectory) -> Summary:
    """Measure the heads, search the tree, choose its size."""
    settings, features = context.config.calibrate, context.upstream[upstream(context.config)[0]]
    ranks = _held_out_ranks(context, features)
    hits_KR, counts_K = ranks.hits(settings.top)
    searched_on, judged_on = ranks.halves()
    trained_K = counts_K[: context.config.train.num_heads]  # a kind may propose deeper
    if int(trained_K.min()) == 0 or not len(judged_on):
        raise DataError(
            f"Head {int(trained_K.argmin())} has nothing to be measured on: the held-out answers are too short for it.",
            str(features.path),
            "Train fewer heads (train.num_heads), hold out more rows (seeds.holdout) or let answers be longer.",
        )
    search = None
    if settings.choices:
        source, choices = "calibrate.choices", read_choices(context.config)
        expected = simulated_acceleration_rate(ranks, choices)
    else:
        budget = MEASURED_SIZES[-1] if settings.nodes == "auto" else settings.nodes
        trees = search_trees(searched_on, max(budget, STOCK_NODES), settings.depth, settings.top)
        longest = max(trees.values(), key=len)
        overheads = _measured(context, features, longest) if settings.nodes == "auto" else {}
        sizes = sorted(overheads) or [budget]  # costs jump between sizes, so they are not interpolated
        source, size = choose_tree(trees, judged_on, sizes, overheads)
        rates = {name: simulated_acceleration_rate(judged_on, found[:size]) for name, found in trees.items()}
        expected = rates[source]
        # The tree that is used is searched on both halves: more data than either has.
        whole = search_trees(ranks, max(budget, STOCK_NODES), settings.depth, settings.top)[source]
        choices = whole[:size]
        measured = _sizes(trees[source], judged_on, overheads)
        search = Search(rates, measured, judged=trees[source][:size], searched=whole[:STOCK_NODES])
    frequencies, accuracies = path_frequencies(ranks, choices), rank_accuracies(hits_KR, counts_K)
    Calibration(choices, frequencies, accuracies, expected, search).write(stage.path)
    return {
        "heads": [_head(hits, int(count)) for hits, count in zip(hits_KR.cumsum(1).tolist(), trained_K, strict=False)],
        "tree": {
            "nodes": len(choices),
            "depth": max(map(len, choices)),
            "source": source,
            "expected_acceleration_rate": round(expected, 4),
            **({"searches": search.searches} if search else {}),
            **({"sizes": search.sizes} if search and search.sizes else {}),
        },
        "positions": int(counts_K.max()),
    }


def _held_out_ranks(context: Context, features: StageDirectory) -> HeldOutRanks:
    train = context.upstream["train"]
    placement = context.placement("train")
    arguments = {
        "shards": tuple(map(str, features.shards())),
        "fingerprint": features.fingerprint,
        "heads": str(train.path / HEADS_FILE),
        "roles": context.config.train.roles,
        "top": context.config.calibrate.top,
        "device": "cuda" if placement.gpus else "cpu",
    }
    return context.executor.call(held_out_ranks, arguments, placement)


def _sizes(choices: tuple[TreePath, ...], ranks: HeldOutRanks, overheads: dict[int, float]) -> list[dict[str, float]]:
    """Overhead, expected acceleration rate and expected speedup of each measured size."""
    rows = []
    for size, overhead in sorted(overheads.items()):
        rate = simulated_acceleration_rate(ranks, choices[:size])
        figures = {"overhead": overhead, "expected_acceleration_rate": rate, "expected_speedup": rate / overhead}
        rows.append({"nodes": size} | {name: round(figure, 4) for name, figure in figures.items()})
    return rows


def _measured(context: Context, features: StageDirectory, choices: tuple[TreePath, ...]) -> dict[int, float]:
    """The overhead of trees of several sizes where the target decodes."""
    placement, room = context.placement("features"), context_length(context.target)
    rows = read_token_rows(features.shards(), features.fingerprint)
    prompts = held_out_prompts(rows, NUM_PROMPTS, room, SPLIT).kept  # chosen as the check's are
    arguments = {
        "target": context.backbone("train"),
        "heads": str(context.upstream["train"].path / HEADS_FILE),
        "trees": {size: choices[:size] for size in sorted({*MEASURED_SIZES, len(choices)}) if size <= len(choices)},
        "prompts": [prompt.ids[-max(1, room - 1 - NUM_STEPS) :] for prompt in prompts],  # cut at the beginning
        "gpus": placement.gpus,
    }
    return context.executor.call(measure_overheads, arguments, placement)


def measure_overheads(
    target: TargetSpec, heads: str, trees: dict[int, tuple[TreePath, ...]], prompts: list[list[int]], gpus: int
) -> dict[int, float]:
    """`overhead_curve` of trained heads on the target, loaded here."""
    model = load_causal_lm(target, "cuda" if gpus else "cpu", max(1, gpus))
    module = load_heads(Path(heads)).to(input_device(model), model.dtype)
    return overhead_curve(model, module, trees, prompts, context_length(target))


def one_line(summary: Summary) -> str:
    tree = summary["tree"]
    accuracies = " ".join(f"{head['top1']:.0%}" for head in summary["heads"])
    rate = tree["expected_acceleration_rate"]
    return f"top-1 {accuracies}; a tree of {tree['nodes']} nodes, expected acceleration rate {rate:.2f}"


def _head(hits_R: list[int], count: int) -> dict[str, Any]:
    """top1 to top5 and how many labels they were measured on."""
    tops = {f"top{rank + 1}": round(hits / count, 4) for rank, hits in enumerate(hits_R[:REPORTED_TOPS])}
    return {**tops, "labels": count}


STAGE = Stage(NAME, VERSION, upstream, identity, run, one_line, placements=("train", "features"))
