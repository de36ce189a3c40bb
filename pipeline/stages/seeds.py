"""seeds: conversations from files and the Hub, each row kept once or quarantined with its reason,
and split for good.

Promises: every row of every source is accounted for; ids are `source:row`; of rows of which
generation reads the same (the answers do not count where the target writes its own) only the first
is kept; `split` (train | calibrate | check) comes from the hash of the first question, so that no
question opens conversations of two splits, with at least 8 held-out rows each. Shards are as large
as `seeds.rows_per_shard` says, by default by the number of rows alone. Reads and writes on the
driver: this is text, minutes at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import shorten
from typing import Any

from pipeline.artifacts.seed_rows import SEEDS, SPLITS, SeedRow
from pipeline.config import GenerateConfig
from pipeline.conversations.conversation import Conversation, Reason, RejectedRow, encodable
from pipeline.conversations.duplicates import CheckQuestions, Deduplicator
from pipeline.conversations.sources import (
    Row,
    SourceReader,
    mixed,
    read_questions,
    source_readers,
)
from pipeline.conversations.splits import (
    MIN_HELD_OUT,
    Openings,
    Split,
    held_out_rows,
    in_shards,
    other_holdout,
    split_rows,
)
from pipeline.errors import DataError
from pipeline.execution.progress import Meter, Progress
from pipeline.formatting import visible
from pipeline.run.checks import check_files
from pipeline.run.context import Context, Stage, StageFiles, reads
from pipeline.storage.fingerprint import fingerprint, ids_digest
from pipeline.storage.receipts import Identity, Receipt, StageTotals, Summary
from pipeline.storage.shards import ShardWriter
from pipeline.storage.stage_directory import StageDirectory

NAME = "seeds"
VERSION = 5

MOST_LINES = 8  # of files that are named in the terminal
ROWS_BETWEEN_REPORTS = 100
LONGEST_QUESTION = 200  # characters of a question that a message repeats


def identity(context: Context) -> Identity:
    """The sources' content and the settings that shape rows."""
    settings = context.config.seeds
    rows: Identity = {
        "sources": [_source_identity(context, reader) for reader in source_readers(settings)],
        "names": [reader.name for reader in source_readers(settings)],
        "max_characters": settings.max_characters,
        "tools": settings.tools,
    }
    return {
        **rows,
        "rows_per_shard": settings.rows_per_shard,
        "holdout": settings.holdout,
        "near_duplicates": settings.near_duplicates,
        **({"similarity": settings.similarity} if settings.near_duplicates == "minhash" else {}),
        "questions": _contaminated(context, rows),
        "read_by": _what_is_read(context.config.generate),
    }


def _what_is_read(generate: GenerateConfig) -> Identity:
    """What of a conversation generation reads, and so what makes two of them the same."""
    return {
        "mode": generate.mode,
        **({"rounds": generate.rounds} if generate.mode == "replay" else {}),
    }


def _contaminated(context: Context, rows: Identity) -> str | None:
    """What the check's questions take out of these rows, as a digest; None where that is nothing.

    Only the run reads a data set of the Hub: with one of them it is the digest of the questions'
    file.
    """
    readers = source_readers(context.config.seeds)
    if not (questions := _questions(context)):
        return None
    content = context.digests.of(questions)
    if any(reader.source.hub for reader in readers):
        return content

    def found() -> str:
        check = CheckQuestions(read_questions(questions))
        each = (
            check.check(row)
            for reader in readers
            for row in reader
            if isinstance(row, Conversation)
        )
        return ids_digest(f"{row.id}: {row.detail}" for row in each if isinstance(row, RejectedRow))

    known = context.digests.derived(
        fingerprint({"contaminated": VERSION, "questions": content, **rows}), found
    )
    return None if known == ids_digest(()) else known


def _source_identity(context: Context, reader: SourceReader) -> Identity:
    source = reader.source
    described: Identity = {
        "format": source.format,
        "limit": source.limit,
        "columns": source.columns,
    }
    described["weight"] = source.weight
    if source.hub:
        return described | {"hub": source.hub, "split": source.split}
    return described | {
        "files": [[file.name, context.digests.of(file)] for file in reader.survey().files]
    }


def run(context: Context, stage: StageDirectory) -> Summary:
    settings = context.config.seeds
    receipts: dict[int, Receipt] = {}
    readers = source_readers(settings)
    openings = Openings()
    with Meter(context.console, NAME) as meter:
        rows = split_rows(_counted(_read(context, readers), meter, openings), settings.holdout)
        for index, chunk in enumerate(in_shards(rows, settings.rows_per_shard)):
            made = receipts[index] = _write_shard(stage, index, chunk)
            counts = {"rows": made.num_rows, "quarantined": made.num_quarantined}
            context.run.event("shard", stage=NAME, shard=index, **counts)
    stage.drop_shards_but(receipts)
    totals = StageTotals(receipts.values())
    totals.check_quarantine(
        NAME, str(stage.path), context.config.limits.max_quarantine_fraction, final=True
    )
    summary = totals.summary() | {"sources": _sources(readers)}
    _say(context, summary)
    if too_alike := require_enough(summary, str(stage.path), settings.holdout, openings):
        summary["warnings"] = [too_alike]
        _print(context, f"{NAME}: {too_alike}")
    return summary


def _sources(readers: Iterable[SourceReader]) -> list[dict[str, Any]]:
    """What was read of each source and what was not, file by file."""
    return [
        {
            "source": reader.name,
            **({"weight": reader.source.weight} if reader.source.weight else {}),
            "read": [asdict(count) | {"name": encodable(count.name)} for count in reader.read],
            "skipped": [
                {"name": encodable(file.name), "why": encodable(file.why)}
                for file in reader.skipped
            ],
        }
        for reader in readers
    ]


def _say(context: Context, summary: Summary) -> None:
    """Name the skipped files, and the files of directories; say how many rows the check's questions
    took out.
    """
    for source in summary["sources"]:
        told = [
            f"read {file['name']}: {file['rows']:,} row{'s' * (file['rows'] != 1)}"
            for file in source["read"]
        ]
        told = told if len(told) > 1 or source["skipped"] else []
        told = [
            *_first(told),
            *_first([f"skipped {file['name']}: {file['why']}" for file in source["skipped"]]),
        ]
        for line in told:
            _print(context, f"{NAME}: {line}")
    if number := summary.get("reasons", {}).get(Reason.CONTAMINATED):
        line = (
            f"{NAME}: {number:,} conversations hold a question of check.prompts and are left out; "
        )
        line += "seeds.decontaminate=false keeps them."
        _print(context, line)


def _print(context: Context, line: str) -> None:
    context.console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def _first(lines: list[str]) -> list[str]:
    more = len(lines) - MOST_LINES
    return lines if more <= 0 else [*lines[:MOST_LINES], f"and {more} more, which the report names"]


def one_line(summary: Summary) -> str:
    held_out = (
        f"{summary['calibrate_rows']:,.0f} to calibrate, {summary['check_rows']:,.0f} to check"
    )
    return f"{summary['rows']:,} conversations ({held_out}), {summary['quarantined']} quarantined"


def _read(context: Context, readers: Sequence[SourceReader]) -> Iterator[Row]:
    settings, questions = context.config.seeds, _questions(context)
    read_by = _what_is_read(context.config.generate)
    deduplicator = Deduplicator(
        **read_by, near=settings.near_duplicates, similarity=settings.similarity
    )
    check = CheckQuestions(read_questions(questions) if questions else ())

    def checked(row: Row) -> Row:
        if isinstance(row, Conversation):
            row = check.check(row)
        return deduplicator.check(row) if isinstance(row, Conversation) else row

    return mixed(readers, checked)


def _questions(context: Context) -> Path | None:
    """The file of the check's questions, where seeds are to hold none of them."""
    prompts = context.config.check.prompts
    if not context.config.seeds.decontaminate or not isinstance(prompts, Path):
        return None
    check_files(context.resolved)
    return prompts


def _counted(rows: Iterable[Row], meter: Meter, openings: Openings) -> Iterator[Row]:
    """The rows, shown as they are read; their first questions are counted."""
    for number, row in enumerate(rows, 1):
        if isinstance(row, Conversation):
            openings.add(row)
        if number % ROWS_BETWEEN_REPORTS == 0:
            meter.show(Progress(done=number, unit="conversations"))
        yield row


def _write_shard(stage: StageDirectory, index: int, chunk: list[Split]) -> Receipt:
    with ShardWriter(
        stage.shard_path(index),
        stage.quarantine_path(index),
        SEEDS,
        index=index,
        fingerprint=stage.fingerprint,
    ) as writer:
        kept = [SeedRow(row, split) for row, split in chunk if isinstance(row, Conversation)]
        writer.write([row.stored() for row in kept])
        for row, _ in chunk:
            if isinstance(row, RejectedRow):
                writer.reject(row)
        splits = [row.split for row in kept]
        counts = {f"{split}_rows": float(splits.count(split)) for split in SPLITS}
        if calling := sum(
            any(message.uses_tools for message in row.conversation.messages) for row in kept
        ):
            counts["tool_rows"] = float(calling)
        return writer.commit(NAME, [row.id for row, _ in chunk], counts)


def require_enough(summary: Summary, where: str, holdout: float, openings: Openings) -> str | None:
    """Check that every split has its 8 rows.

    Returns:
        A warning where a split has fewer than 8, since too many conversations open alike; None
        where all have enough.

    Raises:
        DataError: There are too few rows, or a split has none.
    """
    num_rows = int(summary["rows"])
    rows_of = {split: int(summary.get(f"{split}_rows", 0)) for split in SPLITS}
    fewest = min(SPLITS, key=rows_of.__getitem__)
    if rows_of[fewest] >= MIN_HELD_OUT:
        return None
    held_out = held_out_rows(num_rows, holdout)
    enough_if_all_differed = min(held_out, num_rows - 2 * held_out) >= MIN_HELD_OUT
    if not enough_if_all_differed or openings.rows == 1:
        fix = "Name more or larger sources in seeds.sources"
        if num_rows >= len(SPLITS) * MIN_HELD_OUT:
            fix += f", or {other_holdout(fewest)}"
        what = (
            f"{num_rows} usable conversations are too few: training, calibration and the check need"
            " at least "
        )
        raise DataError(f"{what}{MIN_HELD_OUT} rows each.", where, f"{fix}.")
    question = shorten(openings.question, LONGEST_QUESTION)
    counts = ", ".join(f"{split} {number:,}" for split, number in rows_of.items())
    too_alike = (
        f'"{question}" opens {openings.rows:,} of {num_rows:,} conversations. Conversations that'
        f" open alike are in one split, so that the splits are {counts}."
    )
    if rows_of[fewest] == 0:
        fix = "Name sources in seeds.sources whose conversations open with different questions."
        raise DataError(too_alike, where, fix)
    return too_alike


STAGE = Stage(NAME, VERSION, reads(), identity, run, one_line, files=StageFiles(sharded=True))
