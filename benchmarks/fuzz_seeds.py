"""Claim: no row of a damaged dump is lost, counted twice, or crashes the seed readers.

    python -m benchmarks.fuzz_seeds --rows 100000 --seed 0

Rows of every form are mutated (keys that are gone, values of other types, deep nesting, huge numbers, lone surrogates,
NULs), written as JSONL, JSON arrays or text with mixed line ends and byte order marks, damaged byte by byte, packed and
cut short. Every file is read as in the seeds stage, and each row is stored as there. The expected number of rows is
counted from the bytes, without the readers.
"""

from __future__ import annotations

import argparse
import copy
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
from typing import Any

import pyarrow as pa

from pipeline.artifacts.seed_rows import SEEDS, SeedRow
from pipeline.config import SeedSource
from pipeline.conversations.conversation import Conversation, RejectedRow
from pipeline.conversations.readers import SourceReader
from pipeline.errors import DataError
from pipeline.storage.shards import quarantine_line

ROWS_PER_FILE = 64
FORMS: tuple[Any, ...] = (
    {"id": "a", "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}]},
    {"conversations": [{"role": "system", "content": "be"}, {"role": "user", "content": "how?"}], "category": "x"},
    {"prompt_id": 7, "data": ["why?", "so.", "and?", "no."]},
    {"prompt": "why?", "messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "why?"}]}], "system": "be brief"},
    {"question_id": 81, "category": "writing", "turns": ["why?", "and?"]},
    {"prompt": "why?"},
    "why?",
)
STRANGE: tuple[Any, ...] = (
    *(None, True, 0, -1.5, 10**400, 1e308),
    *("", " \t", "\0", "\ud800", "a\udfffb", "\ufeffx", "\ufdd0", "é" * 300),
    *([], {}, [[]], [None], {"": ""}, [{"from": "human"}], {"role": {}, "content": []}),
    *("../../x", "\x1b[2J", "user", "gpt"),
)
DAMAGE = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\r", b"\n", b"\xef\xbb\xbf", b'"', b"{", b"]", b"\\u12", b"1e999")


@dataclass(frozen=True)
class Expected:
    """The minimum number of rows of a file, and whether reading it may end with an error."""

    rows: int
    breaks_off: bool = False


def mutated_row(rng: random.Random) -> str:
    """One row as a line of JSON, damaged or not."""
    row = copy.deepcopy(rng.choice(FORMS))
    for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
        row = _mutated(row, rng)
    line = json.dumps(row, ensure_ascii=rng.random() < 0.5)
    if rng.random() < 0.02:
        line = line[: rng.randrange(len(line) + 1)]
    if rng.random() < 0.01:
        line = rng.choice(("[", '{"a":')) * rng.choice((3, 2000, 60_000)) + line
    if rng.random() < 0.01:
        line = line.replace("81", "9" * rng.choice((30, 5000))).replace("7", "NaN")
    return line


def _mutated(value: Any, rng: random.Random) -> Any:
    """The value with one place in it changed."""
    if rng.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return copy.deepcopy(rng.choice((*STRANGE, *FORMS)))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key = rng.choice(keys)
    if rng.random() < 0.15:
        value.pop(key)
    elif rng.random() < 0.15 and isinstance(value, list):
        value.insert(key, value[key])
    else:
        value[key] = _mutated(value[key], rng)
    return value


def mutated_file(rng: random.Random, num_rows: int = ROWS_PER_FILE) -> tuple[str, bytes]:
    """A file's name and its bytes."""
    rows = [mutated_row(rng) for _ in range(num_rows)]
    kind = rng.choice((".jsonl", ".jsonl", ".jsonl", ".json", ".txt"))
    if kind == ".json":
        data = _bytes("[" + ",\n".join(row for row in rows if rng.random() < 0.1 or _loads(row)) + "]")
    else:
        ends = rng.choice((("\n",), ("\r\n",), ("\n", "\r\n", "\n\n", "\r\r\n", "\n \t\n")))
        data = _bytes("".join(row + rng.choice(ends) for row in rows))
    for _ in range(rng.choice((0, 0, 1, 4))):
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(DAMAGE) + data[at + rng.randrange(3) :]
    data = b"\xef\xbb\xbf" + data if rng.random() < 0.1 else data
    if rng.random() < 0.2:
        packed = gzip.compress(data, 1)
        data = packed[: rng.randrange(len(packed))] if rng.random() < 0.2 else packed
        kind += ".gz"
    return f"fuzz{kind}", data


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _loads(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def expected(name: str, data: bytes) -> Expected:
    """How many rows a file has, by its bytes."""
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, ValueError, zlib.error):
            return Expected(0, breaks_off=True)
    text = data.decode("utf-8", "replace")
    lines = [line for line in (line.strip("\ufeff \t\r\n") for line in text.split("\n")) if line]
    if ".txt" in name or not text.lstrip("\ufeff").lstrip().startswith("["):
        whole = lines[:1] == ["{"] and _loads("\n".join(lines))
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


def prove(name: str, data: bytes, directory: Path) -> Counter[str]:
    """Read one file and count its rows: kept, and rejected by reason.

    Raises:
        AssertionError: A row is missing, repeated, or cannot be stored.
    """
    path = directory / name
    path.write_bytes(data)
    wanted, (rows, refusal) = expected(name, data), read_all(path)
    assert [row.id for row in rows] == [f"s:{number}" for number in range(len(rows))], "each row once, in order"
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
    """Fuzz until so many rows were read; returns 1 and prints the file's path where a row is lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000, help="read at least so many")
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args(arguments)
    rng, outcomes, files, started = random.Random(settings.seed), Counter[str](), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        while outcomes.total() < settings.rows:
            name, data = mutated_file(rng)
            try:
                outcomes += prove(name, data, Path(temporary))
            except Exception as error:
                kept = Path(tempfile.mkdtemp()) / name
                kept.write_bytes(data)
                print(f"File {files} of seed {settings.seed}, kept as {kept}: {type(error).__name__}: {error}")
                return 1
            files += 1
    seconds = time.monotonic() - started
    kept_rows = outcomes.pop("kept", 0)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in outcomes.most_common())
    total = kept_rows + outcomes.total()
    print(f"{total:,} rows in {files:,} files, {total / seconds:,.0f} rows/s: {kept_rows:,} kept, rejected: {reasons}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
