"""calibrate: each head's accuracy on held-out rows, the tree with the highest expected speedup, and the chain's depth.

Promises: everything is measured on the `calibrate` split, which nothing is trained on, or on what the target answers to
the questions of `calibrate.data`. Trees are searched greedily by the product of accuracies (paper 2.3.3) and by the
frequency of whole paths, on each half of the conversations; each half's trees are judged on the other half, and both
together give the expected rate with its standard error. The search with the higher rate is repeated on all of it. With
`calibrate.nodes: auto` the size with the highest speedup is used, by the overhead of each size measured on this device;
among sizes within 5 % of it the acceleration rate counts too. The number of draft tokens of the chain that vLLM serves
is chosen by the same rule. `calibrate.choices` gives a tree instead. A dynamic tree (`calibrate.tree`) is grown at
held-out positions: one pass gives the rate of every size, and nothing is fitted. Where training tuned the backbone, the
states are those of the `tuned-features` stage.

Limit: overheads are native decoding's. For the chain they stand for those of the engine that serves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.trained_heads import HEADS_FILE, read_trained_heads
from pipeline.artifacts.tree_file import Calibration
from pipeline.config import Config
from pipeline.conversations.readers import read_questions
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutPlaces, HeldOutRanks
from pipeline.decoding.stock_trees import STOCK_NODES
from pipeline.decoding.tree import Choices
from pipeline.decoding.tree_search import CrossFit, rank_accuracies
from pipeline.errors import DataError
from pipeline.evaluation.choosing import (
    ChosenTree,
    Overheads,
    best_dynamic_tree,
    best_tree,
    chains,
    chosen_chain,
    given_tree,
    promise,
)
from pipeline.evaluation.overhead import NUM_PROMPTS, NUM_STEPS, overhead_curve
from pipeline.evaluation.own_text import measured_on_answers, written_answers
from pipeline.evaluation.prompts import held_out_prompts
from pipeline.execution.progress import ProgressReporter
from pipeline.heads.shape import head_kind
from pipeline.report.formatting import with_error
from pipeline.run.context import Context
from pipeline.run.preflight import require_files
from pipeline.run.stage import Stage
from pipeline.run.tree_settings import dynamic_tree, most_draft_tokens, read_choices
from pipeline.storage.done import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import TargetSpec, context_length
from pipeline.training.evaluation import SPLIT, held_out_places, held_out_ranks
from pipeline.training.methods import method_of

NAME = "calibrate"
VERSION = 7

REPORTED_TOPS = 5
MEASURED_SIZES = (1, 3, 7, 15, 31, 63, 127, 255)  # with the root powers of two, which matrix products are fastest at


def upstream(config: Config) -> tuple[str, ...]:
    """The states that the heads are measured on: the cached ones, or those of the tuned backbone."""
    return ("tuned-features" if method_of(config.train).tunes_backbone else "features", "train")


def identity(context: Context) -> Identity:
    """The budget, or the content of the user's tree, and what decides the chain."""
    settings = context.config.calibrate
    choices = read_choices(context.config) if settings.choices else None
    chain = {"draft_tokens": settings.draft_tokens, "timed": _times_chain(context.config)}
    found: Identity = {
        "tree": settings.tree,
        "nodes": settings.nodes,
        "depth": settings.depth,
        "top": settings.top,
        "choices": choices,
        "chain": chain,
    }
    if settings.data:
        require_files(context.config)
        written = context.config.generate.model_dump(mode="json", include={"max_new_tokens", "rounds", "on_truncated"})
        found["data"] = {"file": context.digests.of(settings.data), **written}
    return found


def run(context: Context, stage: StageDirectory) -> Summary:
    """Measure the heads, search the tree, choose its size and the chain's."""
    with context.progress(stage, "conversations") as progress:
        return _measure_and_choose(context, stage, progress)


def _measure_and_choose(context: Context, stage: StageDirectory, progress: ProgressReporter) -> Summary:
    settings, features = context.config.calibrate, context.upstream[upstream(context.config)[0]]
    measured = _on_answers if settings.data else _on_held_out_rows
    ranks, places = measured(context, dynamic_tree(context.config), progress)
    hits_KR, counts_K = ranks.hits(settings.top)
    trained_K = counts_K[: context.config.train.num_heads]  # a kind may propose deeper
    num_conversations = len(np.unique(ranks.conversations))
    if int(trained_K.min()) == 0 or num_conversations < 2:
        raise DataError(
            f"Head {int(trained_K.argmin())} has nothing to be measured on: the held-out answers are too short for it.",
            str(settings.data or features.path),
            "Train fewer heads (train.num_heads), hold out more rows (seeds.holdout) or let answers be longer.",
        )
    fits = _cross_fit(context, ranks)
    tree_overheads, chain_overheads = _measured(context, features, fits, progress)
    tree = _chosen(context.config, ranks, places, fits, tree_overheads)
    fixed = context.config.train.num_heads if settings.draft_tokens == "auto" else settings.draft_tokens
    num_tokens, chain = chosen_chain(ranks, most_draft_tokens(context.config), fixed, chain_overheads)
    estimate = tree.walked.estimate()
    expected = promise(estimate)
    Calibration(
        tree.choices,
        tree.node_shares,
        rank_accuracies(hits_KR, counts_K),
        estimate.rate,
        expected["expected_standard_error"],
        num_tokens,
        chain,
        num_conversations,
        tree.search,
        tree.dynamic,
    ).write(stage.path)
    return {
        "heads": [_head(hits, int(count)) for hits, count in zip(hits_KR.cumsum(1).tolist(), trained_K, strict=False)],
        "tree": {
            "nodes": tree.num_nodes,
            "depth": tree.depth,
            "source": tree.source,
            "text": "calibrate.data" if settings.data else "held-out rows",
            **expected,
            "tokens_by_depth": tree.tokens_by_depth(),
            "num_speculative_tokens": num_tokens,
            "chain": chain,
            **({"dynamic": tree.dynamic.to_json()} if tree.dynamic else {}),
            **({"searches": tree.search.searches} if tree.search else {}),
            **({"sizes": tree.search.sizes} if tree.search and tree.search.sizes else {}),
        },
        "positions": int(counts_K.max()),
        "conversations": num_conversations,
    }


def _chosen(
    config: Config, ranks: HeldOutRanks, places: HeldOutPlaces | None, fits: CrossFit | None, overheads: Overheads
) -> ChosenTree:
    """The user's tree, a dynamic one, or the best that was searched."""
    if fits is None:
        return given_tree(ranks, read_choices(config))
    if (dynamic := dynamic_tree(config)) and places:
        return best_dynamic_tree(dynamic, places, fits, overheads)
    budget = MEASURED_SIZES[-1] if config.calibrate.nodes == "auto" else config.calibrate.nodes
    return best_tree(fits, budget, overheads)


def _cross_fit(context: Context, ranks: HeldOutRanks) -> CrossFit | None:
    """Trees of every size that is asked for; None where the user gives one."""
    settings = context.config.calibrate
    if settings.choices:
        return None
    budget = MEASURED_SIZES[-1] if settings.nodes == "auto" else settings.nodes
    return CrossFit(ranks, max(budget, STOCK_NODES), settings.depth, settings.top)


def _times_chain(config: Config) -> bool:
    """Whether the chain's number of draft tokens is to be found by timing."""
    settings, served = config.calibrate, "vllm" in config.check.engines and head_kind(config.train.heads).vllm_method
    return bool(settings.nodes == "auto" and settings.draft_tokens == "auto" and served)


def _on_held_out_rows(
    context: Context, tree: DynamicTree | None, progress: ProgressReporter
) -> tuple[HeldOutRanks, HeldOutPlaces | None]:
    """The ranks of held-out tokens among the heads' guesses, and their places in a dynamic tree."""
    features, placement = context.upstream[upstream(context.config)[0]], context.placement("train")
    where = {
        "shards": tuple(map(str, features.shards())),
        "fingerprint": features.fingerprint,
        "heads": str(context.upstream["train"].path / HEADS_FILE),
        "roles": context.config.train.roles,
        "device": "cuda" if placement.gpus else "cpu",
    }
    ranks = context.executor.call(held_out_ranks, where | {"top": context.config.calibrate.top}, placement, progress)
    return ranks, context.executor.call(held_out_places, where | {"tree": tree}, placement, progress) if tree else None


def _on_answers(
    context: Context, tree: DynamicTree | None, progress: ProgressReporter
) -> tuple[HeldOutRanks, HeldOutPlaces | None]:
    """The same of the target's answers to the questions of `calibrate.data`."""
    settings, target = context.config.calibrate, context.backbone("train")
    writes, reads = context.placement("generate"), context.placement("features")
    assert settings.data is not None
    arguments = {
        "target": target,
        "conversations": read_questions(settings.data),
        "settings": context.config.generate,
        "gpus": writes.gpus,
        "where": f"calibrate.data = {settings.data}",
    }
    answers = context.executor.call(written_answers, arguments, writes, progress)
    arguments = {
        "target": target,
        "heads": str(context.upstream["train"].path / HEADS_FILE),
        "answers": answers,
        "top": settings.top,
        "tree": tree,
        "gpus": reads.gpus,
    }
    return context.executor.call(measured_on_answers, arguments, reads, progress)


def _measured(
    context: Context, features: StageDirectory, fits: CrossFit | None, progress: ProgressReporter
) -> tuple[Overheads, Overheads]:
    """The overheads of trees of several sizes and of chains where the target decodes; empty where none is asked for."""
    if fits is None or context.config.calibrate.nodes != "auto":
        return {}, {}
    placement, room = context.placement("features"), context_length(context.target)
    rows = read_token_rows(features.shards(), features.fingerprint)
    prompts = held_out_prompts(rows, NUM_PROMPTS, room, SPLIT).kept  # chosen as the check's are
    arguments = {
        "target": context.backbone("train"),
        "heads": str(context.upstream["train"].path / HEADS_FILE),
        "trees": _timed_trees(fits, dynamic_tree(context.config)),
        "chains": chains(most_draft_tokens(context.config)) if _times_chain(context.config) else {},
        "prompts": [prompt.ids[-max(1, room - 1 - NUM_STEPS) :] for prompt in prompts],  # cut at the beginning
        "gpus": placement.gpus,
    }
    return context.executor.call(measure_overheads, arguments, placement, progress)


def _timed_trees(fits: CrossFit, dynamic: DynamicTree | None) -> dict[int, Choices | DynamicTree]:
    """Trees of the measured sizes, as far as there are any, and a static one of the largest."""
    if dynamic:
        return {size: dynamic.resized(size) for size in MEASURED_SIZES if size <= dynamic.num_proposed}
    longest = max(fits.whole.values(), key=len)
    sizes = [size for size in sorted({*MEASURED_SIZES, len(longest)}) if size <= len(longest)]
    return {size: longest[:size] for size in sizes}


def measure_overheads(
    target: TargetSpec,
    heads: str,
    trees: Mapping[int, Choices | DynamicTree],
    chains: Mapping[int, Choices | DynamicTree],
    prompts: list[list[int]],
    gpus: int,
    progress: ProgressReporter | None = None,
) -> tuple[Overheads, Overheads]:
    """`overhead_curve` of trained heads on the target, loaded here, with trees and with chains."""
    model = load_causal_lm(target, "cuda" if gpus else "cpu", max(1, gpus))
    module = read_trained_heads(Path(heads)).to(input_device(model), model.dtype)

    def curve(timed: Mapping[int, Choices | DynamicTree]) -> Overheads:
        return overhead_curve(model, module, timed, prompts, context_length(target), progress) if timed else {}

    return curve(trees), curve(chains)


def one_line(summary: Summary) -> str:
    tree = summary["tree"]
    accuracies = " ".join(f"{head['top1']:.0%}" for head in summary["heads"])
    rate = with_error(tree["expected_acceleration_rate"], tree["expected_standard_error"])
    words = "a dynamic tree" if tree.get("dynamic") else "a tree"
    return f"top-1 {accuracies}; {words} of {tree['nodes']} nodes, expected acceleration rate {rate}"


def _head(hits_R: list[int], count: int) -> dict[str, Any]:
    """top1 to top5 and how many labels they were measured on."""
    tops = {f"top{rank + 1}": round(hits / count, 4) for rank, hits in enumerate(hits_R[:REPORTED_TOPS])}
    return {**tops, "labels": count}


STAGE = Stage(NAME, VERSION, upstream, identity, run, one_line, placements=("generate", "train", "features"))
