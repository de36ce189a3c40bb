"""What fills the feature cache: one forward of the backbone over every row, its states written for `features.py`.

For a span [s, e) the states at positions s-1 … e-2, after the final norm, in the target's own dtype: one per
target-written token, exactly what its lm_head read when it predicted that token. Rows keep their order and ids; a row
with a state that is not finite is quarantined.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pipeline.artifacts.feature_rows import FEATURES, footer_of, row_groups, write_group
from pipeline.artifacts.generated_rows import TOKEN_COLUMNS, TokenRow
from pipeline.config import FeaturesConfig
from pipeline.storage.shards import Receipt
from pipeline.storage.tasks import ShardTask, shard_writer, task_rows
from pipeline.targets.engines import make_feature_engine, semantic_arguments
from pipeline.targets.spec import TargetSpec


def engine_identity(settings: FeaturesConfig) -> dict[str, Any]:
    """What of the settings the states depend on; the batch size only moves rounding noise."""
    return {
        "engine": settings.engine,
        "codec": settings.codec,
        "engine_args": semantic_arguments(settings.engine_args),
    }


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
            return writer.commit("features", ids_in, stats, time.monotonic() - started)

    def close(self) -> None:
        self.engine.close()
