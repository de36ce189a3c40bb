"""Damaged seed files of every kind.

Rows of every form are mutated (keys that are gone, values of other types, deep nesting, huge
numbers, lone surrogates, NULs), written as JSONL, JSON arrays, text, CSV, TSV, Parquet or Arrow,
with mixed line ends and byte order marks, damaged byte by byte, packed and cut short.
"""

from __future__ import annotations

import copy
import csv
import gzip
import io
import json
import random
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

ROWS_PER_FILE = 64
SUFFIXES = (".jsonl", ".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet", ".arrow", ".feather")
FORMS: tuple[Any, ...] = (
    {
        "id": "a",
        "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}],
    },
    {
        "conversations": [{"role": "system", "content": "be"}, {"role": "user", "content": "how?"}],
        "category": "x",
    },
    {"prompt_id": 7, "data": ["why?", "so.", "and?", "no."]},
    {
        "prompt": "why?",
        "messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}],
    },
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "why?"}]}],
        "system": "be brief",
    },
    {"question_id": 81, "category": "writing", "turns": ["why?", "and?"]},
    {"instruction": "why?", "input": "it", "output": "so.", "history": [["how?", "thus."]]},
    {
        "conversations": [
            {"from": "human", "value": "why?"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "7"},
            {"from": "gpt", "value": "so."},
        ],
        "tools": '[{"name": "f", "parameters": {}}]',
    },
    {
        "messages": [
            {"role": "user", "content": "why?"},
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "content": "7"},
        ],
    },
    {"prompt": "why?", "response": "so."},
    "why?",
)
STRANGE: tuple[Any, ...] = (
    *(None, True, 0, -1.5, 10**400, 1e308),
    *("", " \t", "\0", "\ud800", "a\udfffb", "\ufeffx", "\ufdd0", "é" * 300),
    *([], {}, [[]], [None], {"": ""}, [{"from": "human"}], {"role": {}, "content": []}),
    *("../../x", "\x1b[2J", "user", "gpt"),
)
DAMAGE = (
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\0",
    b"\r",
    b"\n",
    b"\xef\xbb\xbf",
    b'"',
    b"{",
    b"]",
    b"\\u12",
    b"1e999",
)


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


@dataclass(frozen=True)
class SeedFile:
    """A file's name, its bytes and, for a table that is whole, its number of rows."""

    name: str
    data: bytes
    num_rows: int | None = None


def mutated_file(
    rng: random.Random, num_rows: int = ROWS_PER_FILE, suffix: str | None = None
) -> SeedFile:
    """A file of the kind that a suffix names, or of any."""
    suffix = suffix or rng.choice(SUFFIXES)
    if suffix in (".jsonl", ".json", ".txt"):
        return SeedFile(*_text_file(rng, num_rows, suffix))
    data, written = _table_file(rng, num_rows, suffix)
    if rng.random() < 0.6:
        return SeedFile(f"fuzz{suffix}", data, written)
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return SeedFile(
        f"fuzz{suffix}", bytes(damaged if rng.random() < 0.8 else data[: rng.randrange(len(data))])
    )


def _table_file(rng: random.Random, num_rows: int, suffix: str) -> tuple[bytes, int]:
    """A table's bytes and its number of rows."""
    if suffix in (".csv", ".tsv"):
        return _delimited(rng, num_rows, "\t" if suffix == ".tsv" else rng.choice(",;\t|"))
    form = rng.choice([form for form in FORMS if isinstance(form, dict)])
    rows = [{key: _like(value, rng) for key, value in form.items()} for _ in range(num_rows)]
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    names = [name for name in table.column_names if pa.types.is_string(table[name].type)]
    for name in names if rng.random() < 0.3 else ():  # texts that are not UTF-8
        broken = pa.array(
            [rng.choice((b"why?", b"\xff", b"", b"\0", b"x" * 2000)) for _ in rows], pa.binary()
        )
        texts = pa.Array.from_buffers(pa.string(), len(rows), broken.buffers())
        table = table.set_column(table.column_names.index(name), name, texts)
    if suffix == ".parquet":
        pq.write_table(
            table,
            sink,
            row_group_size=rng.choice((1, 10, 1000)),
            compression=rng.choice(("none", "zstd")),
        )
    elif suffix == ".feather":
        feather.write_feather(table, sink, compression=rng.choice(("uncompressed", "zstd")))
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rng.choice((1, 10, 1000)))
    return sink.getvalue(), num_rows


def _like(value: Any, rng: random.Random) -> Any:
    """A value of the same type, so that rows of it make a column."""
    if rng.random() < 0.05:
        return None
    if isinstance(value, str):
        return rng.choice(
            (value, value, "", "é" * 300, "\ufeffx", "[", '["why?"]', "\0", "\x1b[2J", "{}")
        )
    if isinstance(value, list):
        return [_like(rng.choice(value), rng) for _ in range(rng.choice((0, 1, len(value), 7)))]
    return (
        {key: _like(item, rng) for key, item in value.items()} if isinstance(value, dict) else value
    )


def _delimited(rng: random.Random, num_rows: int, delimiter: str) -> tuple[bytes, int]:
    """A CSV file's bytes and its number of records; some have more or fewer fields than the
    header.
    """
    form = {key: value for key, value in rng.choice(FORMS[3:-1]).items()}
    out = io.StringIO()
    writer = csv.writer(
        out, delimiter=delimiter, lineterminator=rng.choice(("\n", "\r\n")), quoting=csv.QUOTE_ALL
    )
    writer.writerow([*form, "note"])
    for _ in range(num_rows):
        values = [_like(value, rng) for value in form.values()]
        cells = [value if isinstance(value, str) else json.dumps(value) for value in values]
        cells.append(
            rng.choice(("", "a\nb", 'say "so"', delimiter * 3, "\ud800", "\0", "x" * 2000))
        )
        if rng.random() < 0.05:
            cells = cells[: rng.randrange(1, len(cells))] + ["x"] * rng.choice((0, 9))
        writer.writerow(cells)
    data = _bytes(out.getvalue())
    return b"\xef\xbb\xbf" + data if rng.random() < 0.2 else data, num_rows


def _text_file(rng: random.Random, num_rows: int, kind: str) -> tuple[str, bytes]:
    rows = [mutated_row(rng) for _ in range(num_rows)]
    if kind == ".json":
        data = _bytes(
            "[" + ",\n".join(row for row in rows if rng.random() < 0.1 or is_json(row)) + "]"
        )
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


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
