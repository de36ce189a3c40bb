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

NUM_ROWS = 12
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".feather")
SUFFIXES = (".jsonl", ".jsonl", ".json", ".txt", *TABLES)
ROWS = r"""
{"id": "a", "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "so."}]}
{"category": "x", "conversations": [{"role": "system", "content": "be"}, {"role": "user", "content": "how?"}]}
{"prompt_id": 7, "data": ["why?", "so.", "and?", "no."]}
{"prompt": "why?", "messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so."}]}
{"messages": [{"role": "user", "content": [{"type": "text", "text": "why?"}]}], "system": "be brief"}
{"question_id": 81, "category": "writing", "turns": ["why?", "and?"]}
{"instruction": "why?", "input": "it", "output": "so.", "history": [["how?", "thus."]]}
{"conversations": [{"from": "human", "value": "why?"}, {"from": "function_call", "value": "{\"name\": \"f\"}"}, {"from": "observation", "value": "7"}], "tools": "[{\"name\": \"f\"}]"}
{"messages": [{"role": "user", "content": "why?"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "content": "7"}]}
{"prompt": "why?", "response": "so."}
"""  # noqa: E501
FORMS = [json.loads(line) for line in ROWS.strip().splitlines()]
STRANGE = json.loads(
    r"""[null, true, 0, -1.5, 1e308, "", " \t", "\u0000", "\ud800", "a\udfffb", "\ufeffx", "\ufdd0",
    [], {}, [[]], [null], {"": ""}, [{"from": "human"}], {"role": {}, "content": []}, "../../x",
    "\u001b[2J", "user", "gpt", "why?"]"""
)
DAMAGE = [b"\xff", b"\xc3", b"\xed\xa0\x80", b"\0", b"\r", b"\n", b"\xef\xbb\xbf"]
DAMAGE += [b'"', b"{", b"]", b"\\u12", b"1e999"]


@dataclass(frozen=True)
class SeedFile:
    """A file's name, its bytes and, for a table that is whole, its number of rows."""

    name: str
    data: bytes
    num_rows: int | None = None


def mutated_file(rng: random.Random) -> SeedFile:
    """A file of any kind."""
    suffix = rng.choice(SUFFIXES)
    if suffix not in TABLES:
        return _text_file(rng, suffix)
    data = _delimited(rng, suffix) if suffix in (".csv", ".tsv") else _table(rng, suffix)
    if rng.random() < 0.6:
        return SeedFile(f"fuzz{suffix}", data, NUM_ROWS)
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 2, 8))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    if rng.random() < 0.2:
        damaged = damaged[: rng.randrange(len(damaged))]
    return SeedFile(f"fuzz{suffix}", bytes(damaged))


def _mutated_row(rng: random.Random) -> str:
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
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if rng.random() < 0.15:
        value.pop(key)
    elif rng.random() < 0.15 and isinstance(value, list):
        value.insert(key, value[key])
    else:
        value[key] = _mutated(value[key], rng)
    return value


def _table(rng: random.Random, suffix: str) -> bytes:
    form = rng.choice(FORMS)
    rows = [{key: _like(value, rng) for key, value in form.items()} for _ in range(NUM_ROWS)]
    table = pa.Table.from_pylist(rows)
    for at, field in enumerate(table.schema):
        if pa.types.is_string(field.type) and rng.random() < 0.3:
            texts = [rng.choice((b"why?", b"\xff", b"", b"\0", b"x" * 2000)) for _ in rows]
            buffers = pa.array(texts, pa.binary()).buffers()  # texts that are not UTF-8
            table = table.set_column(
                at, field.name, pa.Array.from_buffers(pa.string(), NUM_ROWS, buffers)
            )
    sink, size = io.BytesIO(), rng.choice((1, 10, 1000))
    if suffix == ".parquet":
        pq.write_table(table, sink, row_group_size=size, compression=rng.choice(("none", "zstd")))
    elif suffix == ".feather":
        feather.write_feather(table, sink, compression=rng.choice(("uncompressed", "zstd")))
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=size)
    return sink.getvalue()


def _like(value: Any, rng: random.Random) -> Any:
    """A value of the same type, so that rows of it make a column."""
    if rng.random() < 0.05:
        return None
    if isinstance(value, str):
        return rng.choice((value, value, "é" * 300, '["why?"]', *filter(_is_text, STRANGE)))
    if isinstance(value, list):
        return [_like(rng.choice(value), rng) for _ in range(rng.choice((0, 1, len(value), 7)))]
    if isinstance(value, dict):
        return {key: _like(item, rng) for key, item in value.items()}
    return value


def _is_text(value: Any) -> bool:
    """Whether Arrow takes it as a string."""
    return isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)


def _delimited(rng: random.Random, suffix: str) -> bytes:
    """A CSV file; some records have more or fewer fields than the header."""
    form = rng.choice(FORMS)
    delimiter = "\t" if suffix == ".tsv" else rng.choice(",;\t|")
    ends = rng.choice(("\n", "\r\n"))
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator=ends, quoting=csv.QUOTE_ALL)
    writer.writerow([*form, "note"])
    for _ in range(NUM_ROWS):
        values = [_like(value, rng) for value in form.values()]
        cells = [value if isinstance(value, str) else json.dumps(value) for value in values]
        cells.append(rng.choice(("", "a\nb", 'say "so"', delimiter * 3, "\ud800", "\0")))
        if rng.random() < 0.05:
            cells = cells[: rng.randrange(1, len(cells))] + ["x"] * rng.choice((0, 9))
        writer.writerow(cells)
    return out.getvalue().encode("utf-8", "surrogatepass")


def _text_file(rng: random.Random, suffix: str) -> SeedFile:
    rows = [_mutated_row(rng) for _ in range(NUM_ROWS)]
    if suffix == ".json":
        text = "[" + ",\n".join(row for row in rows if rng.random() < 0.1 or is_json(row)) + "]"
    else:
        ends = rng.choice((("\n",), ("\r\n",), ("\n", "\r\n", "\n\n", "\r\r\n", "\n \t\n")))
        text = "".join(row + rng.choice(ends) for row in rows)
    data = text.encode("utf-8", "surrogatepass")
    for _ in range(rng.choice((0, 0, 1, 4))):
        at = rng.randrange(len(data) + 1)
        data = data[:at] + rng.choice(DAMAGE) + data[at + rng.randrange(3) :]
    if rng.random() < 0.2:
        data = gzip.compress(data, 1)
        suffix += ".gz"
        if rng.random() < 0.2:
            data = data[: rng.randrange(len(data))]
    return SeedFile(f"fuzz{suffix}", data)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
