"""What goes to the Hub of the conversations that the target wrote: a data set for
`datasets.load_dataset`.

Parquet files of each split, beside a card. Local file names are private: ids of a local source
begin with `local-1`, `local-2`. A second push replaces the files of the first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from huggingface_hub import CommitOperationAdd

from pipeline.artifacts.generated_rows import open_rows
from pipeline.artifacts.seed_rows import SPLITS
from pipeline.export.card import data_set_card
from pipeline.export.card_facts import Published, public, public_names
from pipeline.export.hub import local_paths, require_allowed
from pipeline.export.layout import CARD_FILE
from pipeline.export.upload import Upload

COLUMNS = ["id", "messages", "finish", "input_ids", "spans"]
ROWS_PER_FILE = 50_000
OURS = re.compile(rf"data/({'|'.join(SPLITS)})-\d{{5}}\.parquet")
BESIDE = re.compile(r"README\.md|\.gitattributes|LICEN[CS]E.*|NOTICE.*")


def data_set_upload(
    shards: Collection[Path], fingerprint: str, published: Published, directory: Path
) -> Upload:
    """Write the conversations into an empty directory, which must exist until they are sent.

    Args:
        shards, fingerprint: Of the generate stage.
        published: `base_model` is the model that wrote the answers.

    Raises:
        CheckFailed: The check failed or was not run.
        ConfigError: The id is invalid.
        DataError: A shard is of another run; DamagedShard: it cannot be read.
    """
    repo_id = require_allowed(published, "push.dataset")
    names, rows = public_names(published.config.seeds.sources), {}
    for split in SPLITS:
        if number := _write_split(split, shards, fingerprint, names, directory):
            rows[split] = number
    card = data_set_card(replace(published, data_set=None), rows)
    files = [CommitOperationAdd(CARD_FILE, card.encode(errors="replace"))]
    for path in sorted((directory / "data").glob("*.parquet")):
        files.append(CommitOperationAdd(f"data/{path.name}", path))
    return Upload(
        repo_id=repo_id,
        base_model=public(published.base_model),
        files=files,
        message="Conversations",
        local_paths=local_paths(published),
        conflicting=_not_ours,
        outdated=functools.partial(_outdated, kept={file.path_in_repo for file in files}),
        repo_type="dataset",
    )


def _write_split(
    split: str,
    shards: Collection[Path],
    fingerprint: str,
    names: Mapping[str, str],
    directory: Path,
) -> int:
    """Write `data/SPLIT-00000.parquet` and on, rows in their order; the number of rows."""
    (directory / "data").mkdir(exist_ok=True)
    writer: pq.ParquetWriter | None = None
    num_rows = num_files = rows_in_file = 0
    for table in _tables(split, shards, fingerprint):
        if writer is None or rows_in_file + len(table) > ROWS_PER_FILE:
            if writer is not None:
                writer.close()
            path = directory / "data" / f"{split}-{num_files:05}.parquet"
            writer = pq.ParquetWriter(path, table.schema, compression="zstd")
            num_files += 1
            rows_in_file = 0
        writer.write_table(_anonymous(table, names))
        rows_in_file += len(table)
        num_rows += len(table)
    if writer is not None:
        writer.close()
    return num_rows


def _tables(split: str, shards: Collection[Path], fingerprint: str) -> Iterator[pa.Table]:
    """The rows of a split, shard by shard."""
    for path in shards:
        with open_rows(path, fingerprint) as shard:
            table = shard.read(columns=[*COLUMNS, "split"])
        table = table.filter(pc.equal(table["split"], split)).select(COLUMNS)
        if len(table):
            yield table.replace_schema_metadata(None)


def _anonymous(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """The rows with the public name of their source in each id, `SOURCE:ROW`."""
    ids = []
    for id in table["id"].to_pylist():
        source, colon, row = id.rpartition(":")
        ids.append(f"{names.get(source, source)}{colon}{row}")
    return table.set_column(0, "id", pa.array(ids, pa.string()))


def _not_ours(names: Collection[str]) -> list[str]:
    """The files that conflict with conversations: any other data."""
    return sorted(name for name in names if not OURS.fullmatch(name) and not BESIDE.fullmatch(name))


def _outdated(names: Collection[str], kept: Collection[str]) -> list[str]:
    """The files of an earlier push that the new one does not replace: they would be read with
    it.
    """
    return sorted(name for name in names if OURS.fullmatch(name) and name not in kept)
