"""What fills the feature cache: one forward of the backbone over every row, its states written for `features.py`.

For a span [s, e) the states at positions s-1 … e-2, after the final norm, in the target's own dtype: one per
target-written token, exactly what its lm_head read when it predicted that token. Rows keep their order and ids; a row
with a state that is not finite is quarantined.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from pipeline.artifacts.rows import spans_of
from pipeline.artifacts.schemas import FEATURES
from pipeline.config import FeaturesConfig
from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.conversations.spans import feature_positions
from pipeline.storage.shards import Receipt, ShardWriter
from pipeline.storage.tasks import ShardTask, shard_writer, task_rows
from pipeline.targets.engines import make_feature_engine, semantic_arguments
from pipeline.targets.spec import TargetSpec

TAP = "last hidden state after the final norm"
ROW_GROUP_BYTES = 64 * 1024**2  # what a reader holds at once

Row = dict[str, Any]


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
        self.footer = {
            "dtype": str(self.engine.dtype).removeprefix("torch."),
            "hidden_size": str(self.engine.hidden_size),
            "tap": TAP,
        }

    def __call__(self, task: ShardTask) -> Receipt:
        started = time.monotonic()
        rows = task_rows(task, ["id", "parent_id", "split", "input_ids", "spans"])
        rows = [row for row in rows if self.split in (None, row["split"])]
        positions = 0
        with (
            shard_writer(task, FEATURES, footer=self.footer, codec=self.settings.codec) as writer,
            ThreadPoolExecutor(1) as background,
        ):
            written: deque[Future[int]] = deque()
            states = self.engine.stream(row["input_ids"] for row in rows)
            for group in row_groups(zip(rows, states, strict=True)):
                written.append(background.submit(write_group, writer, group))
                if len(written) > 1:  # one group is written while the next is computed, no more are held
                    positions += written.popleft().result()
            positions += sum(writing.result() for writing in written)
            stats = {"positions": float(positions), "tokens": float(sum(len(row["input_ids"]) for row in rows))}
            ids_in = [*task.poison, *(row["id"] for row in rows)]
            return writer.commit("features", ids_in, stats, time.monotonic() - started)

    def close(self) -> None:
        self.engine.close()


def row_groups(rows: Iterable[tuple[Row, torch.Tensor]]) -> Iterator[list[tuple[Row, torch.Tensor]]]:
    """Each row with its states at the kept positions, in groups of one split and about `ROW_GROUP_BYTES`.

    Who wants the few held-out rows reads them alone, and not the hundred times larger rest with them.
    """
    group: list[tuple[Row, torch.Tensor]] = []
    size = 0
    for row, hidden_TD in rows:
        if group and group[-1][0]["split"] != row["split"]:
            yield group
            group, size = [], 0
        positions_N = feature_positions(spans_of(row))
        kept_ND = hidden_TD[torch.from_numpy(positions_N).long()]
        group.append(({**row, "positions": positions_N}, kept_ND))
        size += kept_ND.nbytes
        if size >= ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def write_group(writer: ShardWriter, group: list[tuple[Row, torch.Tensor]]) -> int:
    """Write rows as one row group, quarantine those with a state that is not finite; how many positions were kept."""
    finite: list[Row] = []
    num_positions = 0
    for row, hidden_ND in group:
        # The sum is finite if all are, and ten times as fast to take; overflowing, it only costs the exact look.
        finite_sum = math.isfinite(float(hidden_ND.sum(dtype=torch.float32)))
        num_bad = 0 if finite_sum else int((~torch.isfinite(hidden_ND).all(dim=1)).sum())
        if num_bad:
            detail = f"{num_bad} of {len(hidden_ND)} states are NaN or infinite"
            writer.reject(
                RejectedRow(
                    row["id"], Reason.NON_FINITE, detail, {"input_ids": row["input_ids"], "spans": row["spans"]}
                )
            )
            continue
        finite.append({**row, "hidden": hidden_ND.view(torch.uint8).numpy().tobytes()})
        num_positions += len(hidden_ND)
    writer.write(finite)
    return num_positions
