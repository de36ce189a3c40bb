"""features: cache the target's last hidden states for every generated row in Parquet.

For each span [s, e) the states at positions s-1 … e-2 are stored: one per target-written token, the
input of the lm_head when it predicts that token. States are taken after the final norm. They have
the target's dtype, or 8 bits with `features.precision`. Rows keep their order and ids. A row with a
state that is not finite is quarantined.

The stage `row-features` caches the outputs of some decoder layers at every token of every row, for
heads that read whole rows (`HeadsShape.row_layers`).

The stage `tuned-features` caches the states of a tuned backbone, only for the held-out rows that
calibrate reads. Runs with the same store and the same tuned backbone share the result.
"""

from __future__ import annotations

import contextlib
import functools
import time

from pipeline.artifacts.feature_writer import FeatureWriter, WaitingMemory, max_waiting_groups
from pipeline.artifacts.generated_rows import TOKEN_COLUMNS, TokenRow
from pipeline.artifacts.state_format import StateFormat
from pipeline.config import FeaturesConfig
from pipeline.execution.progress import ShardProgress
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.run.context import Context, Stage, reads
from pipeline.run.sharded import run_sharded
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.receipts import Identity, Receipt, Summary
from pipeline.storage.shards import ShardTask, ShardWriter, task_rows
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.engines import make_feature_engine, semantic_arguments
from pipeline.targets.spec import TargetSpec
from pipeline.training.held_out_accuracy import SPLIT

NAME = "features"
VERSION = 4
FIGURES = {
    "positions": "positions",
    "bytes_per_position": "bytes per position",
    "tokens_per_second": "tokens per second",
    "quarantined": "quarantined",
}


class Worker:
    """Worker of these stages: turns a shard of generated rows into a shard of their states.

    A thread writes rows while later ones are computed.

    Args:
        split: The split whose rows to compute; None for all rows.
        layers: The layers of row features, ascending; empty for the last states of answers.
    """

    def __init__(
        self,
        target: TargetSpec,
        settings: FeaturesConfig,
        gpus: int,
        progress: ShardProgress | None = None,
        split: str | None = None,
        layers: tuple[int, ...] = (),
    ):
        self.split, self.progress = split, progress or ShardProgress()
        self.engine = make_feature_engine(
            settings.engine, target, settings.tokens_per_batch, settings.engine_args, gpus, layers
        )
        self.states = StateFormat(
            self.engine.dtype, self.engine.hidden_size, settings.precision, layers
        )
        self.waiting = WaitingMemory(max_waiting_groups(len(layers)))

    def __call__(self, task: ShardTask, upcoming: ShardTask | None = None) -> Receipt:
        started = time.monotonic()
        self.progress.begin(task)
        rows = [TokenRow.of(row) for row in task_rows(task, TOKEN_COLUMNS)]
        if self.split is not None:
            rows = [row for row in rows if row.split == self.split]
        num_tokens = sum(len(row.input_ids) for row in rows)
        tokens_computed = 0
        states = self.states
        with (
            ShardWriter(task, states.schema, footer=states.footer) as writer,
            FeatureWriter(writer, rows, states, self.waiting) as features,
            # An open stream would go on computing rows of an abandoned shard.
            contextlib.closing(
                self.engine.stream(row.input_ids.tolist() for row in rows)
            ) as computed,
        ):
            for number, (index, hidden_TX) in enumerate(computed, start=1):
                features.put(index, hidden_TX)
                tokens_computed += len(rows[index].input_ids)
                self.progress.update(task, number, tokens_computed, num_tokens - tokens_computed)
            stats = {"positions": float(features.finish()), "tokens": float(num_tokens)}
            ids_in = [row.id for row in rows]
            return writer.commit(NAME, ids_in, stats, time.monotonic() - started)

    def close(self) -> None:
        """Close the engine."""
        self.engine.close()


def identity(context: Context, *, tuned: bool = False, whole: bool = False) -> Identity:
    """Return what a stage of states depends on: settings, layers, and target or tuned backbone.

    The setting `tokens_per_batch` is left out, since it changes states only by rounding.
    """
    settings = context.config.features
    found: Identity = {
        "engine": settings.engine,
        "precision": settings.precision,
        "engine_args": semantic_arguments(settings.engine_args),
    }
    if tuned:
        files = context.upstream["train"].files_below(BACKBONE_DIRECTORY)
        found["backbone"] = fingerprint({name: facts.sha256 for name, facts in files.items()})
    else:
        found["target"] = context.target_identity
    if whole:
        found["layers"] = list(context.resolved.shape.row_layers)
    return found


def run(
    context: Context, stage: StageDirectory, *, tuned: bool = False, whole: bool = False
) -> Summary:
    """Cache the target's states for all generated rows, and return the totals of the stage.

    With `tuned`, cache the tuned backbone's states, only for the rows of the split `calibrate`.
    With `whole`, cache row features.
    """
    target, split = context.target, None
    if tuned:
        target, split = context.backbone("train"), SPLIT
    placement = context.placement(NAME)
    arguments = {
        "target": target,
        "settings": context.config.features,
        "gpus": placement.gpus,
        "split": split,
        "layers": context.resolved.shape.row_layers if whole else (),
    }
    summary = run_sharded(
        context, stage, context.upstream["generate"], Worker, arguments, placement, split
    )
    size = sum(path.stat().st_size for path in stage.shards())
    return summary | {
        "bytes": size,
        "bytes_per_position": round(size / max(1, summary.get("positions", 0)), 2),
    }


STAGE = Stage(NAME, VERSION, reads("generate"), identity, run, FIGURES, sharded=True)
ROWS = Stage(
    "row-features",
    1,
    reads("generate"),
    functools.partial(identity, whole=True),
    functools.partial(run, whole=True),
    FIGURES,
    sharded=True,
)
TUNED = Stage(
    "tuned-features",
    VERSION,
    reads("generate", "train"),
    functools.partial(identity, tuned=True),
    functools.partial(run, tuned=True),
    FIGURES,
    sharded=True,
)
