"""calibrate: measure the heads on held-out rows, and choose the candidate tree and the chain.

The heads are measured on the `calibrate` split. If training tuned the backbone, the states come
from `tuned-features`.

Static trees are searched by how often whole paths are right. To estimate the acceleration rate and
its standard error, the trees searched on each half of the conversations are replayed on the other
half. The tree searched on all rows is used. A dynamic tree (`calibrate.tree`) is not searched; one
pass over held-out positions gives the rate of every size. `calibrate.choices` gives a tree instead.

The overheads of several tree sizes are measured on this device. With `calibrate.nodes: auto` the
size with the highest speedup is chosen; among sizes within 5 % of it, the highest speedup times
acceleration rate decides. The number of draft tokens of vLLM's chain is chosen by the same rule.
With given numbers the report says what `auto` would have chosen.

Limits: overheads are measured with one request at a time, and in native decoding for vLLM's chain
too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.json_form import to_json
from pipeline.artifacts.seen_answers import training_text
from pipeline.artifacts.trained_heads import HEADS_FILE
from pipeline.artifacts.tree_file import CalibrateResult, Calibration, TreeFigures
from pipeline.config import Config
from pipeline.decoding.held_out import HeldOutRanks
from pipeline.decoding.tree_search import CrossFit, rank_accuracies
from pipeline.errors import DataError
from pipeline.evaluation.choosing import (
    MEASURED_SIZES,
    ChosenTree,
    Overheads,
    best_dynamic_tree,
    best_tree,
    chains,
    chosen_chain,
    expected_on_new,
    expected_speedup,
    given_tree,
    head_accuracies,
    timed_trees,
)
from pipeline.evaluation.overhead import NUM_PROMPTS, NUM_STEPS, measure_overheads
from pipeline.evaluation.prompts import held_out_prompts
from pipeline.execution.progress import ProgressReporter
from pipeline.heads.kinds import reads_rows
from pipeline.run.context import Context, Stage
from pipeline.run.resolved import ENGINE_SECTIONS
from pipeline.storage.receipts import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.training.held_out_accuracy import (
    SPLIT,
    HeldOutText,
    held_out_places,
    held_out_ranks,
)
from pipeline.training.methods import method_of

NAME = "calibrate"
VERSION = 17
FIGURES = {
    "tree.nodes": "nodes",
    "tree.expected_acceleration_rate": "expected acceleration rate",
    "tree.expected_standard_error": "expected standard error",
}


def upstream(config: Config) -> tuple[str, ...]:
    """Return the stages that calibrate reads: cached states, train, and generate.

    The cached states come from features or tuned-features. For kinds of heads with `row_layers`,
    row states are read too.
    """
    states = "tuned-features" if method_of(config.train).tunes_backbone else "features"
    stages = (states, "train", "generate")
    return (*stages, "row-features") if reads_rows(config.train) else stages


def identity(context: Context) -> Identity:
    """Return what calibrate's result depends on: its settings."""
    settings = context.config.calibrate
    return {
        "tree": settings.tree,
        "nodes": settings.nodes,
        "depth": settings.depth,
        "top": settings.top,
        "choices": context.resolved.choices,
        "draft_tokens": settings.draft_tokens,
    }


def run(context: Context, stage: StageDirectory) -> Summary:
    """Measure the heads, choose tree and chain, write tree.json, and return the stage's summary."""
    config, settings = context.config, context.config.calibrate
    num_heads = config.train.num_heads
    with context.progress(stage) as progress:
        ranks, places = _rank_held_out_rows(context, progress)
        hits_KR, counts_K = ranks.guess_hits(settings.top)
        num_conversations = len(np.unique(ranks.conversations))
        _require_labels(counts_K[:num_heads], num_conversations, stage.path)
        tree, chain_overheads = _choose_tree(context, ranks, places, progress)
    longest = context.resolved.max_draft_tokens
    num_tokens, chain = chosen_chain(ranks, longest, num_heads, chain_overheads)
    if settings.draft_tokens != "auto":
        num_tokens = settings.draft_tokens
    Calibration(
        choices=tree.choices,
        accuracies=rank_accuracies(hits_KR, counts_K),
        expected_acceleration_rate=tree.replayed.acceleration_rate,
        num_speculative_tokens=num_tokens,
        # Without times, which differ each time: an equal tree keeps the export and the check.
        chain=[replace(row, overhead=None, expected_speedup=None) for row in chain],
        dynamic=tree.dynamic,
    ).write(stage.path)
    judged = ranks if places is None else places
    figures = TreeFigures(
        nodes=tree.num_nodes,
        depth=tree.depth,
        dynamic=tree.dynamic,
        sizes=tree.sizes or None,
        answers=len(judged.seen),
        seen_share=round(float(judged.seen.mean()), 4),
        new=expected_on_new(judged, tree.replayed),
        num_speculative_tokens=num_tokens,
        chain=chain,
        **expected_speedup(tree.replayed),
    )
    result = CalibrateResult(
        heads=head_accuracies(ranks, settings.top, num_heads),
        tree=figures,
        positions=int(counts_K.max()),
        conversations=num_conversations,
    )
    return to_json(result)


def _choose_tree(
    context: Context,
    ranks: HeldOutRanks,
    places: HeldOutRanks | None,
    progress: ProgressReporter,
) -> tuple[ChosenTree, Overheads]:
    """Return the given tree (`calibrate.choices`), or else the best static or dynamic tree.

    The second result holds the overheads of chains by number of draft tokens; it is empty if they
    were not measured.

    Args:
        ranks: The ranks of held-out tokens among the heads' guesses.
        places: The ranks of held-out tokens among a dynamic tree's nodes; None for a static tree.
    """
    settings, resolved = context.config.calibrate, context.resolved
    if resolved.choices is not None:
        return given_tree(ranks, resolved.choices), {}
    num_nodes = None if settings.nodes == "auto" else settings.nodes
    largest = max(num_nodes or 0, MEASURED_SIZES[-1])
    fits = CrossFit(ranks, largest, settings.depth)
    tree_overheads, chain_overheads = _native_overheads(context, fits, progress)
    if resolved.dynamic_tree is None or places is None:
        return best_tree(fits, num_nodes, tree_overheads), chain_overheads
    tree = best_dynamic_tree(resolved.dynamic_tree, places, fits, num_nodes, tree_overheads)
    return tree, chain_overheads


def _require_labels(counts_K: np.ndarray, num_conversations: int, where: Path) -> None:
    """Raise DataError unless there are two conversations and every head has a label."""
    head = int(counts_K.argmin())
    if counts_K[head] == 0 or num_conversations < 2:
        raise DataError(
            f"Answers of {num_conversations} conversations have {counts_K[head]} labels for head"
            f" {head}; at least one label and two conversations are needed to measure it.",
            where,
            "Train fewer heads (train.num_heads), hold out more rows (seeds.holdout) or let answers"
            " be longer.",
        )


def _native_overheads(
    context: Context, fits: CrossFit, progress: ProgressReporter
) -> tuple[Overheads, Overheads]:
    """Measure the overheads of trees and of chains in native decoding, by number of nodes.

    One request is decoded at a time. The overheads of chains are empty if vLLM cannot serve these
    heads.
    """
    resolved, generated = context.resolved, context.upstream["generate"]
    rows = read_token_rows(generated.shards(), generated.fingerprint)
    prompts = held_out_prompts(rows, NUM_PROMPTS, resolved.context, SPLIT).kept
    longest = max(1, resolved.context - 1 - NUM_STEPS)  # longer prompts lose their beginning
    return context.call(
        measure_overheads,
        ENGINE_SECTIONS["native"],
        progress,
        target=context.backbone("train"),
        heads=_heads_path(context),
        trees=timed_trees(fits, resolved.dynamic_tree),
        chains=chains(resolved.max_draft_tokens) if resolved.times_chain else {},
        prompts=[prompt.ids[-longest:] for prompt in prompts],
    )


def _heads_path(context: Context) -> Path:
    """Return the path of the trained heads."""
    return context.upstream["train"].path / HEADS_FILE


def _rank_held_out_rows(
    context: Context, progress: ProgressReporter
) -> tuple[HeldOutRanks, HeldOutRanks | None]:
    """Rank the tokens of held-out rows among the heads' guesses and a dynamic tree's nodes.

    The second result is None without a dynamic tree.
    """
    states, *_ = upstream(context.config)
    features = context.upstream[states]
    tree, top = context.resolved.dynamic_tree, context.config.calibrate.top
    text = HeldOutText(
        tuple(features.shards()),
        features.fingerprint,
        _heads_path(context),
        context.config.train.roles,
        training_text(context.upstream["generate"]),
    )
    if context.resolved.shape.row_layers:
        row_features = context.upstream["row-features"]
        text = replace(
            text,
            row_shards=tuple(row_features.shards()),
            row_fingerprint=row_features.fingerprint,
        )
    ranks = context.call(held_out_ranks, "train", progress, text=text, top=top)
    if tree is None:
        return ranks, None
    return ranks, context.call(held_out_places, "train", progress, text=text, tree=tree)


STAGE = Stage(NAME, VERSION, upstream, identity, run, FIGURES)
