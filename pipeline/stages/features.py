"""features: cache the backbone's last hidden states of every generated row in Parquet.

Promises: for a span [s, e) the states at positions s-1 … e-2, after the final norm, in the target's
own dtype: one per target-written token, exactly what its lm_head read when it predicted that token,
or with `features.precision` that in 8 bits. Rows keep their order and ids; a row with a state that
is not finite is quarantined.

`tuned-features` does the same for the held-out rows that calibrate looks at, with the backbone that
training tuned. All runs of one store that have the same tuned backbone share it, whatever tree they
search.
"""

from __future__ import annotations

import contextlib
import functools
import time

from pipeline.artifacts.feature_rows import StateFormat
from pipeline.artifacts.feature_writer import FeatureWriter
from pipeline.artifacts.generated_rows import TOKEN_COLUMNS, TokenRow
from pipeline.config import FeaturesConfig
from pipeline.execution.progress import ShardProgress
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.run.context import Context, Stage, reads
from pipeline.run.sharded import run_sharded
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.receipts import Identity, Receipt, Summary
from pipeline.storage.shards import ShardTask, shard_writer, task_rows
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.engines import make_feature_engine, semantic_arguments
from pipeline.targets.spec import TargetSpec
from pipeline.training.held_out_accuracy import SPLIT

NAME = "features"
VERSION = 3
TUNED_NAME = "tuned-features"
FIGURES = ("positions", "bytes_per_position", "tokens_per_second", "quarantined")


class Worker:
    """Turns a shard of generated rows, or of one split of them, into a shard of features.

    Rows are written behind the forwards.
    """

    def __init__(
        self,
        target: TargetSpec,
        settings: FeaturesConfig,
        gpus: int,
        split: str | None = None,
        progress: ShardProgress | None = None,
    ):
        self.settings, self.split, self.progress = settings, split, progress or ShardProgress()
        self.engine = make_feature_engine(
            settings.engine, target, settings.tokens_per_batch, settings.engine_args, gpus
        )
        self.states = StateFormat(self.engine.dtype, self.engine.hidden_size, settings.precision)

    def __call__(self, task: ShardTask) -> Receipt:
        started = time.monotonic()
        self.progress.begin(task)
        rows = [TokenRow.of(row) for row in task_rows(task, TOKEN_COLUMNS)]
        if self.split is not None:
            rows = [row for row in rows if row.split == self.split]
        schema, footer = self.states.schema, self.states.footer
        with (
            shard_writer(task, schema, footer=footer, codec=self.settings.codec) as writer,
            FeatureWriter(writer, rows, self.states) as features,
            # An engine would go on with rows that nobody takes.
            contextlib.closing(
                self.engine.stream(row.input_ids.tolist() for row in rows)
            ) as states,
        ):
            for index, hidden_TD in states:
                features.put(index, hidden_TD)
                self.progress.add(task, 1, len(rows[index].input_ids))
            tokens = sum(len(row.input_ids) for row in rows)
            ids_in = [*task.crashing, *(row.id for row in rows)]
            return features.commit(NAME, ids_in, tokens, started)

    def close(self) -> None:
        self.engine.close()


def engine_identity(settings: FeaturesConfig) -> Identity:
    """The settings that the states depend on; the batch size only moves rounding noise."""
    return {
        "engine": settings.engine,
        "codec": settings.codec,
        "precision": settings.precision,
        "engine_args": semantic_arguments(settings.engine_args),
    }


def identity(context: Context) -> Identity:
    """The engine, how states are stored, and the target."""
    return {**engine_identity(context.config.features), "target": context.target_identity}


def tuned_identity(context: Context) -> Identity:
    """The engine, how states are stored, and the backbone's files, which no shard names."""
    files = context.upstream["train"].files_below(BACKBONE_DIRECTORY)
    content = fingerprint({name: facts.sha256 for name, facts in files.items()})
    return {**engine_identity(context.config.features), "backbone": content}


def run(context: Context, stage: StageDirectory, *, tuned: bool = False) -> Summary:
    """Cache the target's states of all rows, or the tuned backbone's of held-out rows."""
    target, split = context.target, None
    if tuned:
        target, split = context.backbone("train"), SPLIT
    placement = context.placement(NAME)
    arguments = {
        "target": target,
        "settings": context.config.features,
        "gpus": placement.gpus,
        "split": split,
    }
    summary = run_sharded(
        context, stage, context.upstream["generate"], Worker, arguments, placement, "tokens", split
    )
    size = sum(path.stat().st_size for path in stage.shards())
    return summary | {
        "bytes": size,
        "bytes_per_position": round(size / max(1, summary.get("positions", 0)), 2),
    }


STAGE = Stage(NAME, VERSION, reads("generate"), identity, run, FIGURES, sharded=True)
TUNED = Stage(
    TUNED_NAME,
    VERSION,
    reads("generate", "train"),
    tuned_identity,
    functools.partial(run, tuned=True),
    FIGURES,
    sharded=True,
)
