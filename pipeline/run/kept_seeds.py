"""The rows that the seeds stage reads from its sources, and their counts before it runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.config import Config, GenerateConfig
from pipeline.conversations.conversation import Conversation, RejectedRow
from pipeline.conversations.duplicates import CheckQuestions, Deduplicator
from pipeline.conversations.sources import (
    Row,
    SourceReader,
    read_questions,
    source_readers,
)
from pipeline.conversations.splits import held_out_rows, split_rows
from pipeline.storage.receipts import Identity, StageTotals, Summary


def seed_rows(config: Config, readers: Sequence[SourceReader]) -> Iterator[Row]:
    """Yield the rows of all sources; rejected rows are yielded as `RejectedRow`.

    Unusable rows, duplicates, and rows with a question of the check are rejected.
    """
    questions = check_questions(config)
    decontamination = CheckQuestions(read_questions(questions) if questions else ())
    deduplicator = Deduplicator(**read_settings(config.generate))

    for row in itertools.chain.from_iterable(readers):
        for each in (decontamination, deduplicator):
            if isinstance(row, Conversation):
                row = each.check(row)
        yield row


def check_questions(config: Config) -> Path | None:
    """Return the file of questions for decontamination; None if there is nothing to exclude."""
    prompts = config.check.prompts
    return prompts if config.seeds.decontaminate and isinstance(prompts, Path) else None


def read_settings(generate: GenerateConfig) -> Identity:
    """Return the settings that decide which messages of a seed the generate stage reads."""
    if generate.mode == "replay":
        return {"mode": generate.mode, "rounds": generate.rounds}
    return {"mode": generate.mode}


def count_seed_rows(config: Config) -> Summary | None:
    """Count what the seeds stage will make: rows, training rows, rejected rows by reason, warnings.

    Local sources are read. Of a data set on the Hub as many rows as its limit are counted; the
    result is None if one has no limit.

    Raises:
        DataError: All sources are local and too many rows are rejected, as in the seeds stage.
    """
    local, on_hub = [], 0
    for reader in source_readers(config.seeds):
        if reader.source.path:
            local.append(reader)
        elif reader.source.limit is None:
            return None
        else:
            on_hub += reader.source.limit
    totals = StageTotals()
    for row, split in split_rows(seed_rows(config, local), config.seeds.holdout):
        if isinstance(row, RejectedRow):
            totals.quarantined += 1
            totals.reasons[row.reason] += 1
        else:
            totals.rows += 1
            totals.stats[f"{split}_rows"] += 1
    if not on_hub:
        limit = config.limits.max_quarantine_fraction
        totals.check_quarantine("seeds.sources", limit, final=True)
    else:
        totals.rows += on_hub
        held_out = 2 * held_out_rows(totals.rows, config.seeds.holdout)
        totals.stats["train_rows"] = totals.rows - held_out
    warnings = [warning for reader in local for warning in reader.warnings()]
    return {**totals.summary(), "warnings": warnings}
