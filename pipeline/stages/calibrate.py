"""calibrate: each head's accuracy on held-out rows, the tree with the highest expected speedup, and
the chain's depth.

Promises: everything is measured on the `calibrate` split, which nothing is trained on, or on what
the target answers to the questions of `calibrate.data`. Trees are searched greedily by the product
of accuracies (paper 2.3.3) and by the frequency of whole paths, on each half of the conversations;
each half's trees are judged on the other half, and both together give the expected rate with its
standard error. The search with the higher rate is repeated on all of it. With `calibrate.nodes:
auto` the size with the highest speedup is used, by the overhead of each size measured on this
device; among sizes within 5 % of it the acceleration rate counts too. The number of draft tokens of
the chain that vLLM serves is chosen by the same rule, by native overheads. `calibrate.choices`
gives a tree instead. A dynamic tree (`calibrate.tree`) is grown at held-out positions: one pass
gives the rate of every size, and nothing is fitted. Where training tuned the backbone, the states
are those of the `tuned-features` stage.

Limits: one request is decoded at a time, and native overheads stand for those of the chain in vLLM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.artifacts.seen_answers import ENOUGH_NEW, training_text
from pipeline.artifacts.trained_heads import HEADS_FILE
from pipeline.artifacts.tree_file import Calibration
from pipeline.config import Config
from pipeline.conversations.readers import read_questions
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import HeldOutPlaces, HeldOutRanks
from pipeline.decoding.tree import STOCK_NODES
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
    promise_on_new,
)
from pipeline.evaluation.own_text import measured_on_answers, written_answers
from pipeline.evaluation.speed import rounded
from pipeline.execution.progress import ProgressReporter
from pipeline.formatting import with_error
from pipeline.report.facts import expected_rate
from pipeline.run.context import Context
from pipeline.run.preflight import require_files
from pipeline.run.stage import Stage
from pipeline.run.timing import native_overheads
from pipeline.run.tree_settings import (
    MEASURED_SIZES,
    dynamic_tree,
    most_draft_tokens,
    read_choices,
    times_chain,
)
from pipeline.storage.done import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.training.evaluation import held_out_places, held_out_ranks
from pipeline.training.methods import method_of

NAME = "calibrate"
VERSION = 12

REPORTED_TOPS = 5


def upstream(config: Config) -> tuple[str, ...]:
    """The states that the heads are measured on, cached or of the tuned backbone; and the training
    rows' answers.
    """
    states = "tuned-features" if method_of(config.train).tunes_backbone else "features"
    return (states, "train", "generate")


def identity(context: Context) -> Identity:
    """The budget, or the content of the user's tree, and what decides the chain."""
    settings = context.config.calibrate
    choices = read_choices(context.config) if settings.choices else None
    chain = {"draft_tokens": settings.draft_tokens, "timed": times_chain(context.config)}
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
        written = context.config.generate.model_dump(
            mode="json", include={"max_new_tokens", "rounds", "on_truncated"}
        )
        found["data"] = {"file": context.digests.of(settings.data), **written}
    return found


def run(context: Context, stage: StageDirectory) -> Summary:
    """Measure the heads, search the tree, choose its size and the chain's."""
    with context.progress(stage) as progress:
        return _measure_and_choose(context, stage, progress)


def _measure_and_choose(
    context: Context, stage: StageDirectory, progress: ProgressReporter
) -> Summary:
    settings, features = context.config.calibrate, context.upstream[upstream(context.config)[0]]
    measured = _on_answers if settings.data else _on_held_out_rows
    ranks, places = measured(context, dynamic_tree(context.config), progress)
    hits_KR, counts_K = ranks.hits(settings.top)
    trained_K = counts_K[: context.config.train.num_heads]  # a kind may propose deeper
    num_conversations = len(np.unique(ranks.conversations))
    _require_labels(trained_K, num_conversations, str(settings.data or features.path))
    fits = _cross_fit(context, ranks)
    most = most_draft_tokens(context.config)
    timed_chains = chains(most) if times_chain(context.config) else {}
    tree_overheads, chain_overheads = native_overheads(
        context, features, fits, timed_chains, progress
    )
    tree = _chosen(context.config, ranks, places, fits, tree_overheads)
    fixed = (
        context.config.train.num_heads if settings.draft_tokens == "auto" else settings.draft_tokens
    )
    num_tokens, chain = chosen_chain(ranks, most, fixed, chain_overheads)
    estimate = tree.walked.estimate()
    expected = promise(estimate)
    judged: HeldOutRanks | HeldOutPlaces = ranks
    if tree.dynamic and places:
        judged = places
    Calibration(
        tree.choices,
        tree.node_shares,
        rank_accuracies(hits_KR, counts_K),
        estimate.rate,
        expected["expected_standard_error"],
        num_tokens,
        chain,
        tree.search,
        tree.dynamic,
    ).write(stage.path)
    return {
        "heads": _accuracies(ranks, settings.top, context.config.train.num_heads),
        "tree": {
            **_tree_facts(tree, "calibrate.data" if settings.data else "held-out rows"),
            **expected,
            "answers": len(judged.seen),
            "seen_share": rounded(float(judged.seen.mean())),
            "new": promise_on_new(judged, tree.walked),
            "num_speculative_tokens": num_tokens,
            "chain": chain,
        },
        "positions": int(counts_K.max()),
        "conversations": num_conversations,
    }


def _accuracies(ranks: HeldOutRanks, top: int, num_heads: int) -> list[dict[str, Any]]:
    """Each trained head's accuracies, and those on new answers alone where there are enough."""
    hits_KR, counts_K = ranks.hits(top)
    heads = [_head(hits_R, int(count)) for hits_R, count in zip(hits_KR, counts_K, strict=True)]
    new = ranks.new()
    if len(new.starts) >= ENOUGH_NEW:
        new_hits_KR, new_counts_K = new.hits(top)
        for head, hits_R, count in zip(heads, new_hits_KR, new_counts_K, strict=True):
            head["new"] = _head(hits_R, int(count))
    return heads[:num_heads]  # a kind may propose deeper


def _require_labels(trained_K: np.ndarray, num_conversations: int, where: str) -> None:
    """Raise DataError where a head has nothing to be measured on, or there is one conversation
    alone.
    """
    if int(trained_K.min()) == 0 or num_conversations < 2:
        raise DataError(
            f"Head {int(trained_K.argmin())} has nothing to be measured on: the held-out answers"
            " are too short for it.",
            where,
            "Train fewer heads (train.num_heads), hold out more rows (seeds.holdout) or let answers"
            " be longer.",
        )


def _tree_facts(tree: ChosenTree, text: str) -> dict[str, Any]:
    """The chosen tree, on what `text` it was measured, and what it was chosen from."""
    return {
        "nodes": tree.num_nodes,
        "depth": tree.depth,
        "source": tree.source,
        "text": text,
        "tokens_by_depth": tree.tokens_by_depth(),
        **({"dynamic": tree.dynamic.to_json()} if tree.dynamic else {}),
        **({"searches": tree.search.searches} if tree.search else {}),
        **({"sizes": tree.search.sizes} if tree.search and tree.search.sizes else {}),
    }


def _chosen(
    config: Config,
    ranks: HeldOutRanks,
    places: HeldOutPlaces | None,
    fits: CrossFit | None,
    overheads: Overheads,
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
        "trained": training_text(context.upstream["generate"]),
    }
    ranks = context.executor.call(
        held_out_ranks, where | {"top": context.config.calibrate.top}, placement, progress
    )
    return ranks, (
        context.executor.call(held_out_places, where | {"tree": tree}, placement, progress)
        if tree
        else None
    )


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
        "trained": training_text(context.upstream["generate"]),
    }
    return context.executor.call(measured_on_answers, arguments, reads, progress)


def one_line(summary: Summary) -> str:
    tree = summary["tree"]
    accuracies = " ".join(f"{head['top1']:.0%}" for head in summary["heads"])
    rate = with_error(tree["expected_acceleration_rate"], tree["expected_standard_error"])
    words = "a dynamic tree" if tree.get("dynamic") else "a tree"
    line = (
        f"top-1 {accuracies}; {words} of {tree['nodes']} nodes, expected acceleration rate {rate}"
    )
    if tree["seen_share"]:
        line += f", {expected_rate(tree['new'])} on new answers"
    return line


def _head(hits_R: np.ndarray, count: int) -> dict[str, Any]:
    """top1 to top5 and how many labels they were measured on."""
    found: dict[str, Any] = {"labels": count}
    for rank, hits in enumerate(hits_R.cumsum()[:REPORTED_TOPS].tolist()):
        found[f"top{rank + 1}"] = rounded(hits / count) if count else None
    return found


STAGE = Stage(
    NAME,
    VERSION,
    upstream,
    identity,
    run,
    one_line,
)
