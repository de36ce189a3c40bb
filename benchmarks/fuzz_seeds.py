"""Claim: no row of a damaged dump is lost, counted twice, or crashes the seed readers.

    python -m benchmarks.fuzz_seeds --rows 100000 --seed 0 [--suffix .parquet]

Damaged files of every kind (`mutated_seeds`) are read as in the seeds stage, and each row is stored
as there. The expected number of rows is counted from the bytes, without the readers; of a whole
table it is the number written.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from benchmarks.mutated_seeds import SeedFile, is_json, mutated_file
from pipeline.artifacts.seed_rows import SEEDS, SeedRow
from pipeline.config import SeedSource
from pipeline.conversations.conversation import Conversation, RejectedRow
from pipeline.conversations.sources import SourceReader
from pipeline.errors import DataError
from pipeline.storage.shards import quarantine_line


@dataclass(frozen=True)
class Expected:
    """The minimum number of rows of a file, and whether reading it may end with an error."""

    rows: int
    breaks_off: bool = False


def expected(file: SeedFile) -> Expected:
    """How many rows a file has: as it was written, or by its bytes."""
    name, data = file.name, file.data
    if not name.removesuffix(".gz").endswith((".jsonl", ".json", ".txt")):
        return Expected(file.num_rows or 0, breaks_off=file.num_rows is None)
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, ValueError, zlib.error):
            return Expected(0, breaks_off=True)
    text = data.decode("utf-8", "replace")
    lines = [line for line in (line.strip("\ufeff \t\r\n") for line in text.split("\n")) if line]
    if ".txt" in name or not text.lstrip("\ufeff").lstrip().startswith("["):
        whole = lines[:1] == ["{"] and is_json("\n".join(lines))
        return Expected(1 if whole else len(lines))
    try:
        return Expected(len(json.loads(text.lstrip("\ufeff"))), breaks_off=True)
    except (ValueError, RecursionError):
        return Expected(0, breaks_off=True)


def read_all(path: Path) -> tuple[list[Conversation | RejectedRow], DataError | None]:
    """A file's rows, and the error that reading it ended with, if any."""
    rows: list[Conversation | RejectedRow] = []
    try:
        rows.extend(SourceReader(SeedSource(path=path), "s", max_characters=100_000))
    except DataError as error:
        return rows, error
    return rows, None


def prove(file: SeedFile, directory: Path) -> Counter[str]:
    """Read one file and count its rows: kept, and rejected by reason.

    Raises:
        AssertionError: A row is missing, repeated, or cannot be stored.
    """
    path = directory / file.name
    path.write_bytes(file.data)
    wanted, (rows, refusal) = expected(file), read_all(path)
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))], (
        "each row once, in order"
    )
    said = str(refusal or "")
    if refusal and "no conversation data" not in said:
        assert wanted.breaks_off and str(path) in said, f"refused without need: {said}"
    elif wanted.rows or not wanted.breaks_off:  # a malformed array may still be read, row by row
        assert len(rows) == wanted.rows, f"{len(rows)} rows came out of {wanted.rows}"
    said.encode()
    kept = [row for row in rows if isinstance(row, Conversation)]
    pa.RecordBatch.from_pylist([SeedRow(row, "train").stored() for row in kept], schema=SEEDS)
    refused = [row for row in rows if isinstance(row, RejectedRow)]
    for row in refused:
        assert json.loads(quarantine_line(row, "seeds").encode())["id"] == row.id
    return Counter({"kept": len(kept)}) + Counter(str(row.reason) for row in refused)


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz until so many rows were read; returns 1 and prints the file's path where a row is
    lost.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=100_000, help="read at least so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--suffix", help="files of one kind alone, such as .parquet")
    settings = parser.parse_args(arguments)
    rng, outcomes, files, started = (
        random.Random(settings.seed),
        Counter[str](),
        0,
        time.monotonic(),
    )
    with tempfile.TemporaryDirectory() as temporary:
        while outcomes.total() < settings.rows:
            file = mutated_file(rng, suffix=settings.suffix)
            try:
                outcomes += prove(file, Path(temporary))
            except Exception as error:
                kept = Path(tempfile.mkdtemp()) / file.name
                kept.write_bytes(file.data)
                print(
                    f"File {files} of seed {settings.seed}, kept as {kept}: {type(error).__name__}:"
                    f" {error}"
                )
                return 1
            files += 1
    seconds = time.monotonic() - started
    kept_rows = outcomes.pop("kept", 0)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in outcomes.most_common())
    total = kept_rows + outcomes.total()
    print(
        f"{total:,} rows in {files:,} files, {total / seconds:,.0f} rows/s: {kept_rows:,} kept,"
        f" rejected: {reasons}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
