"""features: cache the target's last hidden states for every generated row in Parquet.

For each span [s, e) the states at positions s-1 … e-2 are stored: one per target-written token, the
input of the lm_head when it predicts that token. States are taken after the final norm. They have
the target's dtype, or 8 bits with `features.precision`. Rows keep their order and ids. A row with a
state that is not finite is quarantined.

The stage `tuned-features` caches the states of a tuned backbone, only for the held-out rows that
calibrate reads. Runs with the same store and the same tuned backbone share the result.
"""

from __future__ import annotations

import contextlib
import functools
import time
from concurrent.futures import Future

from pipeline.artifacts.feature_rows import StateFormat
from pipeline.artifacts.feature_writer import FeatureWriter, WaitingMemory
from pipeline.artifacts.generated_rows import TOKEN_COLUMNS, TokenRow
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
VERSION = 3
FIGURES = {
    "positions": "positions",
    "bytes_per_position": "bytes per position",
    "tokens_per_second": "tokens per second",
    "quarantined": "quarantined",
}


class Worker:
    """Worker of the features stage: turns a shard of generated rows into a feature shard.

    A thread writes rows while later ones are computed. The states of the next shard are computed
    while this one is committed.
    """

    def __init__(
        self,
        target: TargetSpec,
        settings: FeaturesConfig,
        gpus: int,
        progress: ShardProgress | None = None,
        split: str | None = None,
    ):
        self.settings, self.split, self.progress = settings, split, progress or ShardProgress()
        self.engine = make_feature_engine(
            settings.engine, target, settings.tokens_per_batch, settings.engine_args, gpus
        )
        self.states = StateFormat(self.engine.dtype, self.engine.hidden_size, settings.precision)
        self.waiting = WaitingMemory()
        self._upcoming: ShardTask | None = None  # the shard of the next call
        self._ahead: ShardInProgress | None = None  # begun while the last one was committed

    def expect(self, upcoming: ShardTask | None) -> None:
        """Announce the task that will follow the next call's task; None if there is none.

        The states of that task are computed while the next call commits its shard.
        """
        self._upcoming = upcoming

    def __call__(self, task: ShardTask) -> Receipt:
        started = time.monotonic()
        shard, self._ahead = self._ahead, None
        if shard is not None and shard.task != task:
            shard.close()
            shard = None
        if shard is None:
            shard = ShardInProgress(self, task)
        with contextlib.closing(shard):
            while shard.advance():
                pass
            committing = shard.commit(started)
            if self._upcoming is not None:
                self._compute_ahead(self._upcoming, committing)
            return committing.result()

    def _compute_ahead(self, task: ShardTask, committing: Future[Receipt]) -> None:
        """Compute states of the next task's shard until `committing` is done.

        Errors are suppressed: the shard is begun again in its turn, and the error is raised then.
        """
        with contextlib.suppress(Exception), contextlib.ExitStack() as undo:
            ahead = undo.enter_context(contextlib.closing(ShardInProgress(self, task)))
            while not committing.done() and ahead.advance():
                pass
            undo.pop_all()
            self._ahead = ahead

    def close(self) -> None:
        """Close the shard that is computed ahead, if any, and the engine."""
        if self._ahead is not None:
            self._ahead.close()
        self.engine.close()


class ShardInProgress:
    """A feature shard that is computed row by row while a thread writes it."""

    def __init__(self, worker: Worker, task: ShardTask):
        self.task = task
        self._progress = worker.progress
        self._progress.begin(task)
        rows = [TokenRow.of(row) for row in task_rows(task, TOKEN_COLUMNS)]
        if worker.split is not None:
            rows = [row for row in rows if row.split == worker.split]
        self._rows = rows
        self._num_tokens = sum(len(row.input_ids) for row in rows)
        self._num_computed = self._tokens_computed = 0
        states = worker.states
        with contextlib.ExitStack() as opened:
            writer = opened.enter_context(ShardWriter(task, states.schema, footer=states.footer))
            self._features = opened.enter_context(
                FeatureWriter(writer, rows, states, worker.waiting)
            )
            self._computed = worker.engine.stream(row.input_ids.tolist() for row in rows)
            # An open stream would go on computing rows of an abandoned shard.
            opened.callback(self._computed.close)
            self._opened = opened.pop_all()

    def advance(self) -> bool:
        """Compute the next row's states and pass them to the writer.

        Return False if no row is left.
        """
        for index, hidden_TD in self._computed:
            self._features.put(index, hidden_TD)
            self._num_computed += 1
            self._tokens_computed += len(self._rows[index].input_ids)
            left = self._num_tokens - self._tokens_computed
            self._progress.update(self.task, self._num_computed, self._tokens_computed, left)
            return True
        return False

    def commit(self, started: float) -> Future[Receipt]:
        """Commit the shard in the writer's thread; return a future of the receipt.

        All rows must have been computed. `started` is the `time.monotonic()` at which the worker
        began the shard.
        """
        ids_in = [row.id for row in self._rows]
        return self._features.commit(NAME, ids_in, self._num_tokens, started)

    def close(self) -> None:
        """Close the engine's stream and the writer; an uncommitted temporary file is deleted."""
        self._opened.close()


def identity(context: Context, *, tuned: bool = False) -> Identity:
    """Return what the features stage's result depends on: settings, and target or tuned backbone.

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
    return found


def run(context: Context, stage: StageDirectory, *, tuned: bool = False) -> Summary:
    """Cache the target's states for all generated rows, and return the totals of the stage.

    With `tuned`, cache the tuned backbone's states, only for the rows of the split `calibrate`.
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
TUNED = Stage(
    "tuned-features",
    VERSION,
    reads("generate", "train"),
    functools.partial(identity, tuned=True),
    functools.partial(run, tuned=True),
    FIGURES,
    sharded=True,
)
