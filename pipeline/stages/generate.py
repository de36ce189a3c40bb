"""generate: the target writes the conversations that its heads learn from (paper 2.3.2).

Each training seed has `generate.samples` samples, with the ids `<id>`, `<id>~2` and so on, all in
one shard; each held-out seed has one. A sample becomes one or more rows, or is quarantined. A row
holds the token ids as they were sampled. A conversation's next turn is requested as soon as its
last one is answered.

Sampling seeds are derived from the run's seed, the sample's id and the turn. So the text does not
depend on the shards, the batches or the number of workers: on a CPU in float32, and on a GPU with
`VLLM_BATCH_INVARIANT`.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from pipeline.artifacts.generated_rows import GENERATED, count_generated, generated_columns
from pipeline.artifacts.seed_rows import SPLITS, SeedRow
from pipeline.config import GenerateConfig
from pipeline.conversations.conversation import RejectedRow, RowRejected, SpecialTokens
from pipeline.conversations.dialogue import Dialogue, DialogueSettings, require_both_sides
from pipeline.conversations.duplicates import TokenIds, require_new_sample
from pipeline.conversations.requests import Sampling
from pipeline.errors import DataError
from pipeline.execution.progress import ShardProgress
from pipeline.run.context import Context, Stage, reads
from pipeline.run.sharded import run_sharded
from pipeline.storage.receipts import Identity, Receipt, Summary
from pipeline.storage.shards import Row, ShardTask, ShardWriter, task_rows
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.dialogue_pool import DialogueGroup, DialoguePool
from pipeline.targets.engines import GenerationEngine, make_generation_engine, semantic_arguments
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids, load_chat_template

NAME = "generate"
VERSION = 7
FIGURES = {
    "rows": "rows",
    "samples": "samples",
    "tokens": "tokens",
    "tokens_per_second": "tokens per second",
    "quarantined": "quarantined",
    "unlearned_answers": "answers marked not to learn",
}

MIN_ROWS = 2  # of each split; a standard error needs two


def identity(context: Context) -> Identity:
    """Return what the generate stage's result depends on: settings, target and the run's seed."""
    settings = context.config.generate.model_dump(mode="json")
    settings["engine_args"] = semantic_arguments(settings["engine_args"])
    return {
        "settings": settings,
        "special_tokens": context.config.seeds.special_tokens,
        "seed": context.config.run.seed,
        "target": context.target_identity,
    }


def run(context: Context, stage: StageDirectory) -> Summary:
    """Generate rows from all seed shards, and return the totals of the generate stage."""
    placement = context.placement(NAME)
    settings = context.config.generate
    require_both_sides(load_chat_template(context.target), settings.mode)  # before workers start
    seeds = context.upstream["seeds"]
    samples = settings.num_samples(int(seeds.summary["train_rows"]))
    arguments = {
        "target": context.target,
        "settings": settings,
        "samples": samples,
        "seed": context.config.run.seed,
        "gpus": placement.gpus,
        "special_tokens": context.config.seeds.special_tokens,
    }
    summary = run_sharded(
        context, stage, seeds, Worker, arguments, placement, train_samples=samples
    )
    require_rows_of_splits(summary, stage)
    return {**summary, "samples": samples}


def require_rows_of_splits(summary: Summary, stage: StageDirectory) -> None:
    """Raise DataError if the generate stage made fewer than `MIN_ROWS` rows of a split."""
    rows_of = {split: int(summary[f"{split}_rows"]) for split in SPLITS}
    if min(rows_of.values()) < MIN_ROWS:
        counts = ", ".join(f"{split} {number:,}" for split, number in rows_of.items())
        what = f"Each split needs at least {MIN_ROWS} rows, and these are left: {counts}."
        fix = (
            "Read the quarantine files there: correct the seeds, name more of them, or change"
            " seeds.holdout."
        )
        raise DataError(what, str(stage.path), fix)


class Worker:
    """Worker of the generate stage: turns a shard of seeds into a shard of generated rows.

    Conversations of the next shard start while the last ones of this shard are still running, so
    that the engine stays busy.
    """

    def __init__(
        self,
        target: TargetSpec,
        settings: GenerateConfig,
        seed: int,
        gpus: int,
        progress: ShardProgress | None = None,
        special_tokens: SpecialTokens = "escape",
        samples: int = 1,
    ):
        self.template = load_chat_template(target)
        self.progress = progress or ShardProgress()
        sampling = Sampling(
            temperature=settings.holdout_temperature,
            top_p=settings.top_p,
            max_new_tokens=settings.max_new_tokens,
            stop_token_ids=eos_token_ids(target),
        )
        self.held_out = DialogueSettings(
            mode=settings.mode,
            sampling=sampling,
            max_tokens=context_length(target),
            rounds=settings.rounds,
            on_truncated=settings.on_truncated,
            seed=seed,
            special_tokens=special_tokens,
        )
        self.training = []  # the settings of each answer to a training prompt
        for temperature in settings.temperatures(samples):
            sampled = replace(sampling, temperature=temperature)
            self.training.append(replace(self.held_out, sampling=sampled))
        self.engine: GenerationEngine | None = None  # None in passthrough mode
        if settings.mode != "passthrough":
            self.engine = make_generation_engine(
                settings.engine, target, settings.engine_args, gpus
            )
        self.pool = DialoguePool(self.engine)
        self._begun: dict[Path, tuple[list[SeedRow], DialogueGroup]] = {}

    def __call__(self, task: ShardTask, upcoming: ShardTask | None = None) -> Receipt:
        started = time.monotonic()

        def begin_upcoming() -> None:
            """Queue the conversations of the next shard."""
            if upcoming is not None:
                self._begin_shard(upcoming)

        seeds, group = self._begin_shard(task)
        self.pool.finish(group, begin_upcoming)
        del self._begun[task.shard]
        earlier: dict[TokenIds, str] = {}
        with ShardWriter(task, GENERATED) as writer:
            rows: list[Row] = []
            for seed, dialogue in zip(seeds, group.dialogues, strict=True):
                try:
                    generated = dialogue.rows()
                    require_new_sample(generated, earlier)
                except RowRejected as rejected:
                    writer.reject(RejectedRow.of(dialogue.id, rejected, seed.stored()))
                    continue
                rows += [generated_columns(row, seed.split) for row in generated]
            writer.write(rows)
            ids_in = [dialogue.id for dialogue in group.dialogues]
            counts = defaultdict(float, count_generated(rows))
            for dialogue in group.dialogues:
                if dialogue.cut_at_tools:
                    counts["cut_at_tools"] += 1
                if dialogue.unlearned_answers:
                    counts["unlearned_answers"] += dialogue.unlearned_answers
            return writer.commit(NAME, ids_in, dict(counts), time.monotonic() - started)

    def _begin_shard(self, task: ShardTask) -> tuple[list[SeedRow], DialogueGroup]:
        """Queue the dialogues of a shard's seeds; return the seed of each dialogue, and the group.

        A seed is listed once per sample. The dialogues of a shard are queued only once.
        """
        if task.shard not in self._begun:
            seeds = []
            dialogues = []
            for seed in map(SeedRow.of, task_rows(task)):
                settings_of_samples = [self.held_out]
                if seed.split == "train":
                    settings_of_samples = self.training
                for sample, settings in enumerate(settings_of_samples, 1):
                    seeds.append(seed)
                    dialogue = Dialogue(seed.conversation, self.template, settings, sample)
                    dialogues.append(dialogue)
            self.progress.begin(task)
            group = self.pool.add(dialogues, functools.partial(self.progress.update, task))
            self._begun[task.shard] = seeds, group
        return self._begun[task.shard]

    def close(self) -> None:
        """Close the generation engine; in passthrough mode there is none."""
        if self.engine is not None:
            self.engine.close()


STAGE = Stage(NAME, VERSION, reads("seeds"), identity, run, FIGURES, sharded=True)
