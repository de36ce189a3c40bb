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
FIGURES = ("positions", "bytes_per_position", "tokens_per_second", "quarantined")


class Worker:
    """Worker of the features stage: makes a feature shard of a shard of generated rows.

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
        self._ahead: ShardInProgress | None = None  # begun while the last shard was committed

    def expect(self, upcoming: ShardTask | None) -> None:
        """Remember the shard that the features stage computes during the next call's commit."""
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
        """Compute states of the features stage's next shard until this one is committed.

        An error is ignored, because the shard begins again in its turn and raises the error then.
        """
        with contextlib.suppress(Exception), contextlib.ExitStack() as undo:
            ahead = undo.enter_context(contextlib.closing(ShardInProgress(self, task)))
            while not committing.done() and ahead.advance():
                pass
            undo.pop_all()
            self._ahead = ahead

    def close(self) -> None:
        """Close the features stage's worker: its engine, and the shard that it computes ahead."""
        if self._ahead is not None:
            self._ahead.close()
        self.engine.close()


class ShardInProgress:
    """A shard of the features stage, computed row by row while a thread writes it."""

    def __init__(self, worker: Worker, task: ShardTask):
        self.task = task
        self._progress = worker.progress
        self._progress.begin(task)
        rows = [TokenRow.of(row) for row in task_rows(task, TOKEN_COLUMNS)]
        if worker.split is not None:
            rows = [row for row in rows if row.split == worker.split]
        self._rows = rows
        states, codec = worker.states, worker.settings.codec
        with contextlib.ExitStack() as opened:
            writer = opened.enter_context(
                ShardWriter(task, states.schema, footer=states.footer, codec=codec)
            )
            self._features = opened.enter_context(
                FeatureWriter(writer, rows, states, worker.waiting)
            )
            self._computed = worker.engine.stream(row.input_ids.tolist() for row in rows)
            # An open stream would go on computing rows of an abandoned shard.
            opened.callback(self._computed.close)
            self._opened = opened.pop_all()

    def advance(self) -> bool:
        """Compute one more row of the features stage's shard; return False if there is none."""
        for index, hidden_TD in self._computed:
            self._features.put(index, hidden_TD)
            self._progress.add(self.task, 1, len(self._rows[index].input_ids))
            return True
        return False

    def commit(self, started: float) -> Future[Receipt]:
        """Let a thread commit the features stage's shard once its rows are written.

        Return the receipt's future at once. `started` is the time when the worker began, by the
        monotonic clock.
        """
        num_tokens = sum(len(row.input_ids) for row in self._rows)
        ids_in = [row.id for row in self._rows]
        return self._features.commit(NAME, ids_in, num_tokens, started)

    def close(self) -> None:
        """Close the features stage's shard; if it is not committed, delete its temporary files."""
        self._opened.close()


def identity(context: Context, *, tuned: bool = False) -> Identity:
    """Collect what the features stage depends on: settings, and the target or tuned backbone.

    The batch size is not among them: it only moves rounding noise.
    """
    settings = context.config.features
    found: Identity = {
        "engine": settings.engine,
        "codec": settings.codec,
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
    """Run the features stage: cache the target's states of all rows, or a tuned backbone's.

    Of a tuned backbone only the states of held-out rows are cached.
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
