"""The overheads of trees and chains of several sizes, timed where the target decodes natively.

On held-out prompts, one request at a time. The results are kept; nothing is timed again on resume.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.trained_heads import HEADS_FILE
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import Choices
from pipeline.decoding.tree_search import CrossFit
from pipeline.evaluation.choosing import Overheads
from pipeline.evaluation.overhead import NUM_PROMPTS, NUM_STEPS, measure_overheads
from pipeline.evaluation.prompts import held_out_prompts
from pipeline.execution.progress import ProgressReporter
from pipeline.run.context import Context
from pipeline.run.resolved import ENGINE_SECTIONS
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import context_length
from pipeline.training.held_out_accuracy import SPLIT

MEASURED_SIZES = (1, 3, 7, 15, 31, 63, 127, 255)
"""With the root powers of two, which matrix products are fastest at."""


def native_overheads(
    context: Context,
    features: StageDirectory,
    fits: CrossFit | None,
    chains: Mapping[int, Choices],
    progress: ProgressReporter,
) -> tuple[Overheads, Overheads]:
    """The overheads of trees of several sizes, and of these chains; empty where no size is to be
    chosen.
    """
    if fits is None or not context.resolved.times_trees:
        return {}, {}
    placement = context.placement(ENGINE_SECTIONS["native"])
    room = context_length(context.target)
    rows = read_token_rows(features.shards(), features.fingerprint)
    prompts = held_out_prompts(rows, NUM_PROMPTS, room, SPLIT).kept
    longest = max(1, room - 1 - NUM_STEPS)  # longer prompts lose their beginning
    arguments = {
        "target": context.backbone("train"),
        "heads": str(context.upstream["train"].path / HEADS_FILE),
        "trees": _timed_trees(fits, context.resolved.dynamic_tree),
        "chains": chains,
        "prompts": [prompt.ids[-longest:] for prompt in prompts],
        "gpus": placement.gpus,
    }
    return context.executor.call(measure_overheads, arguments, placement, progress)


def _timed_trees(fits: CrossFit, dynamic: DynamicTree | None) -> dict[int, Choices | DynamicTree]:
    """Trees of the measured sizes, as far as there are any, and a static one of the largest."""
    trees: dict[int, Choices | DynamicTree] = {}
    if dynamic is not None:
        for size in MEASURED_SIZES:
            if size <= dynamic.num_proposed:
                trees[size] = dynamic.resized(size)
        return trees
    longest = max(fits.whole.values(), key=len)
    for size in (*MEASURED_SIZES, len(longest)):
        if size <= len(longest):
            trees[size] = longest[:size]
    return trees
