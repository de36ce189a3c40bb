"""Upload of the target's conversations as a Hub data set that `datasets.load_dataset` reads.

The data set is a card and a Parquet file per split. Local file names are private: the row
ids of a local source begin with `local-` and the source's number. A second push replaces the files
of the first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from huggingface_hub import CommitOperationAdd

from pipeline.artifacts.generated_rows import open_rows
from pipeline.artifacts.seed_rows import SPLITS
from pipeline.export.card import Published, data_set_card, public_model, public_names
from pipeline.export.hub import Upload, local_paths, require_allowed
from pipeline.export.layout import CARD_FILE

COLUMNS = ["id", "messages", "finish", "input_ids", "spans"]
OURS = re.compile(rf"data/({'|'.join(SPLITS)})-\d{{5}}\.parquet")
BESIDE = re.compile(r"README\.md|\.gitattributes|LICEN[CS]E.*|NOTICE.*")


class DataSetUpload(Upload):
    """An upload of conversations to a Hub data set, which replaces an earlier upload."""

    repo_type = "dataset"

    def conflicting(self, names: Collection[str]) -> list[str]:
        """Return the Hub data set's files that no upload writes, except licences and notices."""
        ours = {name for name in names if OURS.fullmatch(name) or BESIDE.fullmatch(name)}
        return sorted(set(names) - ours)

    def outdated(self, names: Collection[str]) -> list[str]:
        """Return files of an earlier upload to the Hub data set that this one does not replace."""
        kept = {file.path_in_repo for file in self.files}
        return sorted(name for name in names if OURS.fullmatch(name) and name not in kept)


def data_set_upload(
    shards: Collection[Path], fingerprint: str, published: Published, directory: Path
) -> Upload:
    """Prepare the Hub upload of the target's conversations as a data set.

    Args:
        shards: The shards of the generate stage.
        fingerprint: The fingerprint of the generate stage.
        published: `base_model` is the model that wrote the answers.
        directory: The Parquet files are written here; it must exist until the upload is sent.

    Raises:
        CheckFailed: The check failed or was not run.
        ConfigError: The repository's id is invalid.
        DataError: A shard is of another run.
        DamagedShard: A shard cannot be read.
    """
    repo_id = require_allowed(published, "push.dataset")
    names = public_names(published.config.seeds.sources)
    data = directory / "data"
    data.mkdir()
    num_rows = {}
    for split in SPLITS:
        number = _write_split(split, shards, fingerprint, names, data)
        if number:
            num_rows[split] = number
    card = data_set_card(replace(published, data_set=None), num_rows)
    files = [CommitOperationAdd(CARD_FILE, card.encode(errors="replace"))]
    for path in sorted(data.iterdir()):
        files.append(CommitOperationAdd(f"data/{path.name}", path))
    return DataSetUpload(
        repo_id=repo_id,
        base_model=public_model(published.base_model),
        files=files,
        local_paths=local_paths(published),
    )


def _write_split(
    split: str,
    shards: Collection[Path],
    fingerprint: str,
    names: Mapping[str, str],
    directory: Path,
) -> int:
    """Write a split of the Hub data set to `SPLIT-00000.parquet`; return the number of rows.

    A split without rows has no file.
    """
    num_rows = 0
    writer = None
    for path in shards:
        with open_rows(path, fingerprint) as shard:
            table = shard.read(columns=[*COLUMNS, "split"])
        table = table.filter(pc.equal(table["split"], split)).select(COLUMNS)
        if not len(table):
            continue
        table = _anonymous(table, names).replace_schema_metadata(None)
        if writer is None:
            path = directory / f"{split}-00000.parquet"
            writer = pq.ParquetWriter(path, table.schema, compression="zstd")
        writer.write_table(table)
        num_rows += len(table)
    if writer is not None:
        writer.close()
    return num_rows


def _anonymous(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """Return rows of the Hub data set with the seed source's public name in their ids."""
    ids = []
    for id in table["id"].to_pylist():
        source, _, row = id.rpartition(":")
        ids.append(f"{names[source]}:{row}")
    return table.set_column(0, "id", pa.array(ids, pa.string()))
