"""Streaming readers of tables: Parquet, Arrow (Feather), Arrow streams, and data sets on the Hub.

A row is a dict, or a `RejectedRow` if the row cannot be read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.conversations.conversation import Reason
from pipeline.conversations.file_rows import CHUNK, require_columns, unreadable_row
from pipeline.errors import ConfigError, DataError, EnvironmentFault

BATCH_ROWS = 64


def table_rows(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a file in Parquet, Arrow (Feather) or Arrow stream format, as dicts.

    An unreadable row is yielded as a `RejectedRow`.

    Raises:
        ConfigError: The file lacks one of `columns`.
        DataError: The file is damaged, or has none of these formats.
        OSError: The file cannot be opened or read.
    """
    try:
        with pa.memory_map(os.fsencode(path)) as file:  # Arrow takes no str that is not UTF-8
            parquet = file.read(4) == b"PAR1"
            file.seek(0)
            read_batches = _parquet_batches if parquet else _arrow_batches
            for batch in read_batches(file, columns, path):
                yield from _batch_rows(batch)
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # of the file system
        raise DataError(
            f"The file is damaged, or is not a table: {' '.join(str(error).split())[:200]}",
            path,
            "Copy or download it again.",
        ) from error


def _parquet_batches(
    file: pa.NativeFile, columns: Sequence[str], path: Path
) -> Iterator[pa.RecordBatch]:
    """Yield record batches of a Parquet file; raise ConfigError if it lacks one of `columns`."""
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=CHUNK) as reader:
        require_columns(reader.schema_arrow.names, columns, path)
        yield from reader.iter_batches(BATCH_ROWS, use_threads=False)


def _arrow_batches(
    file: pa.NativeFile, columns: Sequence[str], path: Path
) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file or stream; raise ConfigError as `_parquet_batches`."""
    try:
        reader = pa.ipc.open_file(file)
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        reader = pa.ipc.open_stream(file)
        batches = iter(reader)
    require_columns(reader.schema.names, columns, path)
    yield from batches


def _batch_rows(batch: pa.RecordBatch) -> Iterator[Any]:
    """Yield the rows of a record batch as dicts, an unreadable row as a `RejectedRow`.

    The batch is validated first, because a wrong offset would read beyond the file's memory.
    """
    types = {field.name: field.type for field in batch.schema}
    rows: list[Any]
    try:
        batch.validate(full=True)
        rows = []
        for row in batch.to_pylist():
            rows.append({name: _json_value(row[name], kind) for name, kind in types.items()})
    except (ValueError, ArithmeticError, RecursionError) as error:
        if len(batch) > 1:
            for number in range(len(batch)):
                yield from _batch_rows(batch.slice(number, 1))
            return
        rows = [unreadable_row(Reason.UNDECODABLE, f"The row cannot be read: {error}.")]
    yield from rows


def _json_value(value: Any, kind: pa.DataType) -> Any:
    """Convert a value of an Arrow column to the JSON value that it was made of.

    A struct has every field of its column, so fields that are null are left out. Text of Arrow's
    JSON type is parsed.
    """
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if isinstance(kind, pa.StructType):
        fields = {name: item for name, item in value.items() if item is not None}
        return {name: _json_value(item, kind.field(name).type) for name, item in fields.items()}
    if isinstance(value, list):
        inner = getattr(kind, "value_type", None)
        return [_json_value(item, inner) for item in value]
    return value


def hub_rows(hub: str, split: str, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a data set on the Hub as dicts, streamed.

    Raises:
        ConfigError: There is no such data set, split or column.
        EnvironmentFault: The Hub or the data set cannot be read.
    """
    import datasets  # seconds to import, and only some runs read the Hub

    where = f"{hub}, split {split}"
    try:
        found = datasets.load_dataset(hub, split=split, streaming=True)
        if found.features is not None:
            require_columns(list(found.features), columns, where)
        for table in found.with_format("arrow").iter(BATCH_ROWS):
            for batch in table.to_batches():
                yield from _batch_rows(batch)
    except ConfigError:
        raise
    except (datasets.exceptions.DatasetNotFoundError, ValueError) as error:
        raise ConfigError(
            f"The Hub has no such data set or split: {_first_line(error)}",
            where,
            "Correct seeds.sources.",
        ) from error
    except Exception as error:  # of the network, the file system or a damaged file
        raise EnvironmentFault(
            f"The data set cannot be read now: {_first_line(error)}",
            where,
            "Check the network, or download it and name its files in seeds.sources.",
        ) from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type name if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
