"""seeds: conversations from files and the Hub, without duplicates, divided into splits.

Every row that is read is kept or quarantined with a reason. Row ids are `source:row`. Of rows that
are equal for the generate stage, only the first is kept. Rows with the same first question are in
the same split (train, calibrate or check). The stage runs on the driver.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from pipeline.artifacts.seed_rows import SEEDS, SPLITS, SeedRow
from pipeline.conversations.conversation import Conversation, RejectedRow, storable_json
from pipeline.conversations.duplicates import CheckQuestions
from pipeline.conversations.sources import SourceReader, read_questions, source_readers
from pipeline.conversations.splits import (
    MIN_HELD_OUT,
    Split,
    batch_into_shards,
    held_out_rows,
    split_rows,
)
from pipeline.errors import DataError
from pipeline.execution.progress import Meter, Progress, print_stage
from pipeline.run.checks import check_prompts_file
from pipeline.run.context import Context, Stage, reads
from pipeline.run.kept_seeds import check_questions, read_settings, seed_rows
from pipeline.storage.fingerprint import fingerprint, ids_digest
from pipeline.storage.receipts import Identity, Receipt, StageTotals, Summary
from pipeline.storage.shards import ShardWriter
from pipeline.storage.stage_directory import StageDirectory

NAME = "seeds"
VERSION = 8
FIGURES = {
    "rows": "rows",
    "train_rows": "train rows",
    "calibrate_rows": "calibrate rows",
    "check_rows": "check rows",
    "quarantined": "quarantined",
}


def identity(context: Context) -> Identity:
    """Return what the seeds stage's result depends on: settings, and the content of local files."""
    settings, readers = context.config.seeds, source_readers(context.config.seeds)
    rows = {
        "sources": [_source_identity(context, reader) for reader in readers],
        "names": [reader.name for reader in readers],
    }
    return {
        **rows,
        "rows_per_shard": settings.rows_per_shard,
        "holdout": settings.holdout,
        "questions": _questions_identity(context, readers, rows),
        "read_by": read_settings(context.config.generate),
    }


def _questions_identity(context: Context, readers: Sequence[SourceReader], rows: Identity) -> str:
    """Return a digest of the rows that decontamination rejects.

    Local sources are read to find these rows, and the digest is cached. The digest does not change
    if a question is added that no row contains. If any source is on the Hub, no source is read, and
    the sha256 of the file of questions is returned.
    """
    questions = check_questions(context.config)
    if questions is None:
        return ids_digest(())
    check_prompts_file(context.resolved)
    content = context.digests.of(questions)
    if any(reader.source.hub for reader in readers):
        return content
    key = fingerprint({"contaminated": VERSION, "questions": content, **rows})
    return context.digests.derived(key, lambda: ids_digest(_contaminated(readers, questions)))


def _contaminated(readers: Sequence[SourceReader], questions: Path) -> Iterator[str]:
    """Yield the id and the reason of each row that contains a question of the check."""
    check = CheckQuestions(read_questions(questions))
    for reader in readers:
        for row in reader:
            if isinstance(row, Conversation):
                checked = check.check(row)
                if isinstance(checked, RejectedRow):
                    yield f"{row.id}: {checked.detail}"


def _source_identity(context: Context, reader: SourceReader) -> Identity:
    """Return what the seeds depend on in one source: its settings and the hashes of local files."""
    source = reader.source
    found = source.model_dump(include={"format", "limit", "columns"})
    if source.hub:
        return {**found, "hub": source.hub, "split": source.split}
    files = [[file.name, context.digests.of(file)] for file in reader.files()]
    return {**found, "files": files}


def run(context: Context, stage: StageDirectory) -> Summary:
    """Read, filter and split the rows of all sources; write the shards and return the summary."""
    settings = context.config.seeds
    readers = source_readers(settings)
    totals = StageTotals()
    with Meter(context.console, NAME) as meter:
        rows = split_rows(seed_rows(context.config, readers), settings.holdout)
        for index, chunk in enumerate(batch_into_shards(rows, settings.rows_per_shard)):
            receipt = _write_shard(stage, index, chunk)
            totals.add(receipt)
            counts = {"rows": receipt.num_rows, "quarantined": receipt.num_quarantined}
            context.run.event("shard", stage=NAME, shard=index, **counts)
            meter.show(Progress(done=totals.rows, unit="conversations"))
    stage.drop_shards_but(range(totals.shards))
    limits = context.config.limits
    totals.check_quarantine(stage.path, limits.max_quarantine_fraction, final=True)
    summary = {**totals.summary(), "sources": [_source_summary(reader) for reader in readers]}
    warnings = [warning for reader in readers for warning in reader.warnings()]
    shortage = require_rows_of_splits(stage, summary, settings.holdout)
    if shortage:
        warnings.append(shortage)
    if warnings:
        summary["warnings"] = storable_json(warnings)
    for warning in summary.get("warnings", ()):
        print_stage(context.console, "[yellow]![/]", NAME, warning)
    return summary


def _source_summary(reader: SourceReader) -> Summary:
    """Return a source's summary: its name, and the row counts of each file."""
    return storable_json({"source": reader.name, "read": [asdict(count) for count in reader.read]})


def _write_shard(stage: StageDirectory, index: int, chunk: Sequence[Split]) -> Receipt:
    """Write a shard of seeds and its quarantine file, and return the receipt."""
    with ShardWriter(stage.task(index), SEEDS) as writer:
        kept = []
        counts = {"tool_rows": 0.0, **{f"{split}_rows": 0.0 for split in SPLITS}}
        for row, split in chunk:
            if isinstance(row, RejectedRow):
                writer.reject(row)
                continue
            kept.append(SeedRow(row, split).stored())
            counts[f"{split}_rows"] += 1
            counts["tool_rows"] += any(message.uses_tools for message in row.messages)
        writer.write(kept)
        return writer.commit(NAME, [row.id for row, _ in chunk], counts)


def require_rows_of_splits(stage: StageDirectory, summary: Summary, holdout: float) -> str | None:
    """Check that the seeds stage made at least `MIN_HELD_OUT` rows of each split.

    Args:
        holdout: The setting `seeds.holdout`.

    Returns:
        A warning if a split has fewer rows because too many conversations have the same first
            question; None if all splits have enough.

    Raises:
        DataError: There are too few rows for three splits, or a split has none.
    """
    num_rows = summary["rows"]
    rows_of = {split: int(summary.get(f"{split}_rows", 0)) for split in SPLITS}
    fewest = min(rows_of.values())
    if fewest >= MIN_HELD_OUT:
        return None
    require_enough_rows(num_rows, holdout, str(stage.path))
    counts = ", ".join(f"{split} {number:,}" for split, number in rows_of.items())
    too_alike = (
        "Many conversations open with the same question, and these are in one split, so that the"
        f" splits are {counts}."
    )
    if fewest == 0:
        raise DataError(
            too_alike,
            stage.path,
            "Set seeds.sources to sources whose conversations open with different questions.",
        )
    return too_alike


def require_enough_rows(num_rows: int, holdout: float, where: str) -> None:
    """Raise DataError if there are too few rows for three splits, even if all open differently."""
    held_out = held_out_rows(num_rows, holdout)
    if min(held_out, num_rows - 2 * held_out) < MIN_HELD_OUT:
        raise DataError(
            f"{num_rows:,} conversations are too few: training, calibration and the check"
            f" need at least {MIN_HELD_OUT} rows each.",
            where,
            "Add sources to seeds.sources, or use larger ones. From"
            f" {3 * MIN_HELD_OUT} conversations on, you can also change seeds.holdout.",
        )


STAGE = Stage(NAME, VERSION, reads(), identity, run, FIGURES, sharded=True)
