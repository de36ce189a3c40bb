"""features: one forward of the backbone over every generated row, its last hidden states cached in Parquet.

Promises: for a span [s, e) the states at positions s-1 … e-2, after the final norm, in the target's own dtype: one per
target-written token, exactly what its lm_head read when it predicted that token. Rows keep their order and ids; a row
with a state that is not finite is quarantined.

`tuned-features` does the same for the held-out rows that calibrate looks at, with the backbone that training tuned. All
runs of one store that have the same tuned backbone share it, whatever tree they search.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.artifacts.feature_rows import FEATURES, footer_of, row_groups, write_group
from pipeline.artifacts.generated_rows import TOKEN_COLUMNS, TokenRow
from pipeline.config import FeaturesConfig
from pipeline.run.context import Context
from pipeline.run.sharded import run_sharded
from pipeline.run.stage import Stage, reads
from pipeline.storage.done import Identity, Summary
from pipeline.storage.receipts import Receipt
from pipeline.storage.stage_directory import StageDirectory
from pipeline.storage.tasks import ShardTask, shard_writer, task_rows
from pipeline.targets.engines import make_feature_engine, semantic_arguments
from pipeline.targets.spec import TargetSpec
from pipeline.training.evaluation import SPLIT
from pipeline.training.methods import method_of

NAME = "features"
VERSION = 1
TUNED_NAME = "tuned-features"


class Worker:
    """Holds a backbone; turns one shard of generated rows into one shard of features, of all its rows or of one split.

    Writing overlaps the next forward.
    """

    def __init__(self, target: TargetSpec, settings: FeaturesConfig, gpus: int, split: str | None = None):
        self.settings, self.split = settings, split
        self.engine = make_feature_engine(
            settings.engine, target, settings.tokens_per_batch, settings.engine_args, gpus
        )
        self.footer = footer_of(self.engine.dtype, self.engine.hidden_size)

    def __call__(self, task: ShardTask) -> Receipt:
        started = time.monotonic()
        found = map(TokenRow.of, task_rows(task, TOKEN_COLUMNS))
        rows = [row for row in found if self.split in (None, row.split)]
        positions = 0
        with (
            shard_writer(task, FEATURES, footer=self.footer, codec=self.settings.codec) as writer,
            ThreadPoolExecutor(1) as background,
        ):
            written: deque[Future[int]] = deque()
            states = self.engine.stream(row.input_ids.tolist() for row in rows)
            for group in row_groups(zip(rows, states, strict=True)):
                written.append(background.submit(write_group, writer, group))
                if len(written) > 1:  # one group is written while the next is computed, no more are held
                    positions += written.popleft().result()
            positions += sum(writing.result() for writing in written)
            stats = {"positions": float(positions), "tokens": float(sum(len(row.input_ids) for row in rows))}
            ids_in = [*task.poison, *(row.id for row in rows)]
            return writer.commit(NAME, ids_in, stats, time.monotonic() - started)

    def close(self) -> None:
        self.engine.close()


def engine_identity(settings: FeaturesConfig) -> Identity:
    """What of the settings the states depend on; the batch size only moves rounding noise."""
    return {"engine": settings.engine, "codec": settings.codec, "engine_args": semantic_arguments(settings.engine_args)}


def identity(context: Context) -> Identity:
    """The engine, the codec and the target."""
    return {**engine_identity(context.config.features), "target": context.target_identity}


def tuned_identity(context: Context) -> Identity:
    """The engine, the codec and the content of the backbone, which no shard names."""
    return {**engine_identity(context.config.features), "backbone": context.upstream["train"].content}


def run(context: Context, stage: StageDirectory, *, tuned: bool = False) -> Summary:
    """Cache every pending shard's states: the target's of all rows, or those of the tuned backbone of held-out rows."""
    target, split = (context.backbone("train"), SPLIT) if tuned else (context.target, None)
    placement = context.placement(NAME)
    arguments = {"target": target, "settings": context.config.features, "gpus": placement.gpus, "split": split}
    summary = run_sharded(context, stage, context.upstream["generate"], Worker, arguments, placement, unit="positions")
    size = sum(path.stat().st_size for path in stage.shards())
    return summary | {"bytes": size, "bytes_per_position": round(size / max(1, summary.get("positions", 0)), 2)}


def one_line(summary: Summary) -> str:
    speed = f", {summary['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in summary else ""
    positions = f"{summary.get('positions', 0):,.0f} positions of {summary['bytes_per_position']:,.0f} bytes"
    return f"{positions}{speed}, {summary['quarantined']} quarantined"


STAGE = Stage(
    NAME,
    VERSION,
    reads("generate"),
    identity,
    run,
    one_line,
    skipped=lambda config: method_of(config.train).skipped(config.train).get(NAME),
    sharded=True,
    placements=(NAME,),
)
TUNED = Stage(
    TUNED_NAME,
    VERSION,
    reads("generate", "train"),
    tuned_identity,
    functools.partial(run, tuned=True),
    one_line,
    skipped=lambda config: None if method_of(config.train).tunes_backbone else "",
    sharded=True,
    placements=(NAME,),
)
