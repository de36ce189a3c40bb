"""Stage `seeds`: conversations from files and the Hub, deduplicated and split.

Every row of every source is kept once or quarantined with a reason. Row ids are `source:row`. Of
rows with the same messages to read in generation only the first is kept. The hash of the first
question decides the split (train, calibrate, check), so that no question opens conversations of two
splits; each split has at least 8 rows. The stage runs on the driver, in minutes at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

from pipeline.artifacts.seed_rows import SEEDS, SPLITS, SeedRow, most_frequent_opening
from pipeline.config import GenerateConfig
from pipeline.conversations.conversation import Conversation, RejectedRow, escape_surrogates
from pipeline.conversations.duplicates import CheckQuestions, Deduplicator
from pipeline.conversations.sources import (
    Row,
    SourceReader,
    mix_sources,
    read_questions,
    source_readers,
)
from pipeline.conversations.splits import (
    MIN_HELD_OUT,
    Split,
    batch_into_shards,
    held_out_rows,
    split_rows,
)
from pipeline.errors import DataError
from pipeline.execution.progress import Meter, Progress
from pipeline.formatting import visible
from pipeline.run.checks import check_files
from pipeline.run.context import Context, Stage, reads
from pipeline.storage.fingerprint import fingerprint, ids_digest
from pipeline.storage.receipts import Identity, Receipt, StageTotals, Summary
from pipeline.storage.shards import ShardWriter
from pipeline.storage.stage_directory import StageDirectory

NAME = "seeds"
VERSION = 6
FIGURES = ("rows", "calibrate_rows", "check_rows", "quarantined")
LONGEST_QUESTION = 200  # characters of a question that a message repeats

MOST_SHOWN = 8  # of skipped files in the terminal


def identity(context: Context) -> Identity:
    """The identity of the seeds: the sources' content and the settings that shape rows."""
    settings, readers = context.config.seeds, source_readers(context.config.seeds)
    rows: Identity = {
        "sources": [_source_identity(context, reader) for reader in readers],
        "names": [reader.name for reader in readers],
        "max_characters": settings.max_characters,
        "tools": settings.tools,
    }
    found = {
        **rows,
        "rows_per_shard": settings.rows_per_shard,
        "holdout": settings.holdout,
        "near_duplicates": settings.near_duplicates,
        "questions": _contaminated_digest(context, readers, rows),
        "read_by": _read_settings(context.config.generate),
    }
    if settings.near_duplicates == "minhash":
        found["similarity"] = settings.similarity
    return found


def _read_settings(generate: GenerateConfig) -> Identity:
    """The settings that decide which messages generation reads, for deduplication."""
    if generate.mode == "replay":
        return {"mode": generate.mode, "rounds": generate.rounds}
    return {"mode": generate.mode}


def _contaminated_digest(
    context: Context, readers: Sequence[SourceReader], rows: Identity
) -> str | None:
    """The digest of the rows that contain a question of the check; None for no such row.

    Sources on the Hub are read by the run alone: then it is the digest of the questions' file.
    """
    questions = _check_questions(context)
    if questions is None:
        return None
    content = context.digests.of(questions)
    if any(reader.source.hub for reader in readers):
        return content

    def digest() -> str:
        check, rejected = CheckQuestions(read_questions(questions)), []
        for reader in readers:
            for row in reader:
                found = check.check(row) if isinstance(row, Conversation) else None
                if isinstance(found, RejectedRow):
                    rejected.append(f"{found.id}: {found.detail}")
        return ids_digest(rejected)

    key = fingerprint({"contaminated": VERSION, "questions": content, **rows})
    known = context.digests.derived(key, digest)
    return None if known == ids_digest(()) else known


def _source_identity(context: Context, reader: SourceReader) -> Identity:
    source = reader.source
    found = source.model_dump(include={"format", "limit", "columns", "weight"})
    if source.hub:
        return {**found, "hub": source.hub, "split": source.split}
    files = [[file.name, context.digests.of(file)] for file in reader.files()]
    return {**found, "files": files}


def run(context: Context, stage: StageDirectory) -> Summary:
    """Read the sources, quarantine and deduplicate their rows, and write the split seeds."""
    settings = context.config.seeds
    receipts: dict[int, Receipt] = {}
    readers = source_readers(settings)
    num_rows = 0
    with Meter(context.console, NAME) as meter:
        rows = split_rows(_read(context, readers), settings.holdout)
        for index, chunk in enumerate(batch_into_shards(rows, settings.rows_per_shard)):
            receipt = _write_shard(stage, index, chunk)
            receipts[index] = receipt
            counts = {"rows": receipt.num_rows, "quarantined": receipt.num_quarantined}
            context.run.event("shard", stage=NAME, shard=index, **counts)
            num_rows += receipt.num_rows
            meter.show(Progress(done=num_rows, unit="conversations"))
    stage.drop_shards_but(receipts)
    totals, where = StageTotals(receipts.values()), str(stage.path)
    totals.check_quarantine(NAME, where, context.config.limits.max_quarantine_fraction, final=True)
    summary = {**totals.summary(), "sources": [_source_summary(reader) for reader in readers]}
    _print_sources(context, summary)
    warning = require_rows_of_splits(stage, summary, settings.holdout)
    if warning:
        summary["warnings"] = [warning]
        _print(context, warning)
    return summary


def _source_summary(reader: SourceReader) -> dict[str, Any]:
    """The summary of a source: its files with their rows, and its skipped files."""
    found: dict[str, Any] = {"source": reader.name, "read": [], "skipped": []}
    if reader.source.weight:
        found["weight"] = reader.source.weight
    for count in reader.read:
        found["read"].append({**asdict(count), "name": escape_surrogates(count.name)})
    for file in reader.skipped:
        found["skipped"].append(
            {"name": escape_surrogates(file.name), "why": escape_surrogates(file.why)}
        )
    return found


def _print_sources(context: Context, summary: Summary) -> None:
    """Print the skipped files of each source."""
    for source in summary["sources"]:
        skipped = source["skipped"]
        if skipped:
            shown = [f"{file['name']} ({file['why']})" for file in skipped[:MOST_SHOWN]]
            _print(context, f"skipped {len(skipped)} files: {', '.join(shown)}")


def _print(context: Context, line: str) -> None:
    context.console.print(visible(f"{NAME}: {line}"), markup=False, highlight=False, soft_wrap=True)


def _read(context: Context, readers: Sequence[SourceReader]) -> Iterator[Row]:
    settings, questions = context.config.seeds, _check_questions(context)
    deduplicator = Deduplicator(
        **_read_settings(context.config.generate),
        near=settings.near_duplicates,
        similarity=settings.similarity,
    )
    check = CheckQuestions(read_questions(questions) if questions else ())

    def checked(row: Row) -> Row:
        if isinstance(row, Conversation):
            row = check.check(row)
        return deduplicator.check(row) if isinstance(row, Conversation) else row

    return mix_sources(readers, checked)


def _check_questions(context: Context) -> Path | None:
    """The file of the check's questions if `seeds.decontaminate` is set, or else None."""
    prompts = context.config.check.prompts
    if not context.config.seeds.decontaminate or not isinstance(prompts, Path):
        return None
    check_files(context.resolved)
    return prompts


def _write_shard(stage: StageDirectory, index: int, chunk: Sequence[Split]) -> Receipt:
    with ShardWriter(stage.task(index), SEEDS) as writer:
        kept, tool_rows = [], 0.0
        counts = {f"{split}_rows": 0.0 for split in SPLITS}
        for row, split in chunk:
            if isinstance(row, RejectedRow):
                writer.reject(row)
                continue
            kept.append(SeedRow(row, split).stored())
            counts[f"{split}_rows"] += 1
            tool_rows += any(message.uses_tools for message in row.messages)
        writer.write(kept)
        if tool_rows:
            counts["tool_rows"] = tool_rows
        return writer.commit(NAME, [row.id for row, _ in chunk], counts)


def require_rows_of_splits(stage: StageDirectory, summary: Summary, holdout: float) -> str | None:
    """Check that every split of the seeds has at least 8 rows.

    Returns:
        A warning where a split has fewer because too many conversations open alike; None where all
        splits have enough.

    Raises:
        DataError: There are too few rows, or a split has none.
    """
    num_rows = int(summary["rows"])
    rows_of = {split: int(summary.get(f"{split}_rows", 0)) for split in SPLITS}
    if min(rows_of.values()) >= MIN_HELD_OUT:
        return None
    held_out = held_out_rows(num_rows, holdout)
    enough_if_all_differed = min(held_out, num_rows - 2 * held_out) >= MIN_HELD_OUT
    if not enough_if_all_differed:
        what = (
            f"{num_rows} usable conversations are too few: training, calibration and the check"
            f" need at least {MIN_HELD_OUT} rows each."
        )
        fix = "Name more or larger sources in seeds.sources, or change seeds.holdout."
        raise DataError(what, str(stage.path), fix)
    question, num_alike = most_frequent_opening(stage.shards())
    counts = ", ".join(f"{split} {number:,}" for split, number in rows_of.items())
    too_alike = (
        f'"{shorten(question, LONGEST_QUESTION)}" opens {num_alike:,} of {num_rows:,}'
        f" conversations. Conversations that open alike are in one split, so that the splits are"
        f" {counts}."
    )
    if min(rows_of.values()) == 0:
        fix = "Name sources in seeds.sources whose conversations open with different questions."
        raise DataError(too_alike, str(stage.path), fix)
    return too_alike


STAGE = Stage(NAME, VERSION, reads(), identity, run, FIGURES, sharded=True)
