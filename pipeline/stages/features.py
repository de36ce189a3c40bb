"""features: one forward of the backbone over every generated row, its last hidden states cached in
Parquet.

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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.artifacts.feature_rows import StateFormat
from pipeline.artifacts.feature_writer import Backlog, FeatureWriter
from pipeline.artifacts.generated_rows import TOKEN_COLUMNS, TokenRow
from pipeline.config import Config, FeaturesConfig
from pipeline.execution.progress import ShardProgress
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.run.context import Context, Stage, StageFiles, reads
from pipeline.run.sharded import run_sharded
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.receipts import Identity, Receipt, Summary
from pipeline.storage.shards import Codec, ShardTask, shard_writer, task_rows
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.engines import FeatureEngine, make_feature_engine, semantic_arguments
from pipeline.targets.spec import TargetSpec
from pipeline.training.evaluation import SPLIT
from pipeline.training.methods import method_of

NAME = "features"
VERSION = 3
TUNED_NAME = "tuned-features"


class Worker:
    """Holds a backbone; turns one shard of generated rows into one shard of features, of all its
    rows or of one split.

    Rows are written behind the forwards. The next shard's rows are read meanwhile, and its states
    are computed while the last rows of this one are written and committed.
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
        self.backlog = Backlog()
        self._reader = ThreadPoolExecutor(1)
        self._upcoming: ShardTask | None = None
        self._ahead: ShardUnderWay | None = None

    def expect(self, upcoming: ShardTask | None) -> None:
        """Remember the shard that comes after the next call's."""
        self._upcoming = upcoming

    def __call__(self, task: ShardTask) -> Receipt:
        started = time.monotonic()
        with self._begun(task) or self._begin(task, self._rows(task)) as shard:
            following = self._upcoming
            rows = self._reader.submit(self._rows, following) if following else None
            while shard.advance():
                pass
            committed = shard.commit(started)
            if following and rows:
                self._work_ahead(following, rows, committed)
            return committed.result()

    def close(self) -> None:
        if self._ahead:
            self._ahead.close()
        self._reader.shutdown()
        self.engine.close()

    def _work_ahead(
        self, task: ShardTask, rows: Future[list[TokenRow]], committed: Future[Receipt]
    ) -> None:
        """Compute the next shard's states until this one is committed. What fails here is begun
        again in its turn.
        """
        with contextlib.suppress(Exception), contextlib.ExitStack() as undo:
            ahead = undo.enter_context(self._begin(task, rows.result()))
            while not committed.done() and ahead.advance():
                pass
            undo.pop_all()
            self._ahead = ahead

    def _begun(self, task: ShardTask) -> ShardUnderWay | None:
        """The shard, if it was begun while the last one was committed."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.task == task:
            return ahead
        ahead.close()
        return None

    def _begin(self, task: ShardTask, rows: list[TokenRow]) -> ShardUnderWay:
        self.progress.begin(task)
        report = functools.partial(self.progress.add, task)
        return ShardUnderWay(
            task, rows, self.engine, self.states, self.settings.codec, self.backlog, report
        )

    def _rows(self, task: ShardTask) -> list[TokenRow]:
        rows = map(TokenRow.of, task_rows(task, TOKEN_COLUMNS))
        return [row for row in rows if self.split in (None, row.split)]


class ShardUnderWay(contextlib.AbstractContextManager["ShardUnderWay"]):
    """A shard whose states are computed row by row, and written behind that."""

    def __init__(
        self,
        task: ShardTask,
        rows: list[TokenRow],
        engine: FeatureEngine,
        states: StateFormat,
        codec: Codec,
        backlog: Backlog,
        report: Callable[[int, int], None],
    ):
        self.task, self._rows, self._report = task, rows, report
        self._computed = engine.stream(row.input_ids.tolist() for row in rows)
        with contextlib.ExitStack() as opened:
            writer = opened.enter_context(
                shard_writer(task, states.schema, footer=states.footer, codec=codec)
            )
            self._writer = opened.enter_context(FeatureWriter(writer, rows, states, backlog))
            opened.callback(
                self._computed.close
            )  # an engine would go on with rows that nobody takes
            self._opened = opened.pop_all()

    def advance(self) -> bool:
        """Compute one more row, or wait until earlier ones are written; False after the last."""
        for index, hidden_TD in self._computed:
            self._writer.put(index, hidden_TD)
            self._report(1, len(self._rows[index].input_ids))
            return True
        return False

    def commit(self, started: float) -> Future[Receipt]:
        """Commit the shard once all is written; `started` is when its worker began."""
        tokens = sum(len(row.input_ids) for row in self._rows)
        ids_in = [*self.task.crashing, *(row.id for row in self._rows)]
        return self._writer.commit(NAME, ids_in, tokens, started)

    def close(self) -> None:
        """Without a commit before it, leave nothing behind."""
        self._opened.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def engine_identity(settings: FeaturesConfig) -> Identity:
    """The settings that the states depend on; the batch size only moves rounding noise."""
    stored = {"codec": settings.codec, "precision": settings.precision}
    return {
        "engine": settings.engine,
        **stored,
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
    """Cache every pending shard's states: the target's of all rows, or those of the tuned backbone
    of held-out rows.
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
        context, stage, context.upstream["generate"], Worker, arguments, placement, "tokens", split
    )
    size = sum(path.stat().st_size for path in stage.shards())
    return summary | {
        "bytes": size,
        "bytes_per_position": round(size / max(1, summary.get("positions", 0)), 2),
    }


def one_line(summary: Summary) -> str:
    line = f"{summary.get('positions', 0):,.0f} positions"
    line += f" of {summary['bytes_per_position']:,.0f} bytes"
    if "tokens_per_second" in summary:
        line += f", {summary['tokens_per_second']:,.0f} tokens/s"
    return f"{line}, {summary['quarantined']} quarantined"


def wanted(config: Config) -> str | None:
    """Explain why the method skips the cache; None if it does not."""
    return method_of(config.train).skipped(config.train).get(NAME)


def tuned_wanted(config: Config) -> str | None:
    return None if method_of(config.train).tunes_backbone else ""


STAGE = Stage(
    NAME,
    VERSION,
    reads("generate"),
    identity,
    run,
    one_line,
    wanted=wanted,
    files=StageFiles(sharded=True),
)
TUNED = Stage(
    TUNED_NAME,
    VERSION,
    reads("generate", "train"),
    tuned_identity,
    functools.partial(run, tuned=True),
    one_line,
    wanted=tuned_wanted,
    files=StageFiles(sharded=True),
)
