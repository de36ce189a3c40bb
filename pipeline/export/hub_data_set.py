"""Publishes the conversations that the target wrote, as a data set that `datasets.load_dataset` reads.

Parquet files of each split, beside a card. Local file names are not told: ids of a local source begin with `local-1`,
`local-2`. A second push replaces the files of the first.
"""

from __future__ import annotations

import functools
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from huggingface_hub import CommitOperationAdd

from pipeline.artifacts.generated_rows import open_rows
from pipeline.artifacts.seed_rows import SPLITS
from pipeline.export.card import data_set_card
from pipeline.export.card_facts import public, public_names
from pipeline.export.hub import require_passed_check
from pipeline.export.layout import CARD_FILE
from pipeline.export.parcel import Parcel, Push
from pipeline.export.upload import check_repo_id
from pipeline.heads.kind import Heads

COLUMNS = ("id", "messages", "finish", "input_ids", "spans")
ROWS_PER_FILE = 50_000
OURS = re.compile(rf"data/({'|'.join(SPLITS)})-\d{{5}}\.parquet")
BESIDE = re.compile(r"README\.md|\.gitattributes|LICEN[CS]E.*|NOTICE.*")


@dataclass(frozen=True)
class GeneratedShards:
    """The shards of the generate stage, and the fingerprint that they must have."""

    shards: Collection[Path]
    fingerprint: str


def push_data_set(
    generated: GeneratedShards, push: Push, kind: type[Heads], work_in: Path | None = None
) -> dict[str, Any]:
    """Push the conversations, as one commit; return the receipt.

    Args:
        push: `repo_id` is the data set's, `base_model` the model that wrote the answers, local or not.
        kind: The heads that were trained on them.
        work_in: Where the files are written before they go, and deleted; a place of the system's by default.

    The receipt and what is raised are those of `push_export`; a damaged shard raises `DamagedShard`.
    """
    check_repo_id(push.repo_id, "push.dataset", with_owner=True)
    report = require_passed_check(push.report)
    names = public_names((push.recipe.get("seeds") or {}).get("sources") or ())
    with tempfile.TemporaryDirectory(dir=work_in, prefix=".data-set-") as directory:
        rows = write_splits(generated, names, Path(directory))
        splits = {split: f"data/{split}-*" for split, number in rows.items() if number}
        card = data_set_card(
            report,
            repo_id=push.repo_id,
            base_model=push.base_model,
            recipe=push.recipe,
            kind=kind,
            rows={split: rows[split] for split in splits},
            splits=splits,
        )
        files = sorted(path for path in Path(directory).rglob("*") if path.is_file())
        additions = [CommitOperationAdd(path.relative_to(directory).as_posix(), path) for path in files]
        card_file = CommitOperationAdd(CARD_FILE, card.encode(errors="replace"))
        pushed = replace(push, base_model=public(push.base_model))
        stale = functools.partial(_stale, kept={addition.path_in_repo for addition in additions})
        local = push.base_model or ""
        files_to_go = [card_file, *additions]
        how: dict[str, Any] = {"repo_type": "dataset", "stale": stale}
        return Parcel.of(pushed, files_to_go, local, "Conversations", _not_ours, **how).send()


def write_splits(generated: GeneratedShards, names: Mapping[str, str], directory: Path) -> dict[str, int]:
    """Write `data/SPLIT-00000.parquet` and on, rows in their order; the number of rows of each split.

    Args:
        names: What a source is called, by its name in ids.

    Raises:
        DamagedShard: A shard cannot be read.
        DataError: A shard is of another run.
    """
    (directory / "data").mkdir(parents=True)
    rows = dict.fromkeys(SPLITS, 0)
    for split in SPLITS:
        writer: pq.ParquetWriter | None = None
        for table in _tables_of(generated, split):
            if writer is None or rows[split] % ROWS_PER_FILE + len(table) > ROWS_PER_FILE:
                if writer:
                    writer.close()
                number = len(list((directory / "data").glob(f"{split}-*")))
                path = directory / "data" / f"{split}-{number:05}.parquet"
                writer = pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(_renamed(table, names))
            rows[split] += len(table)
        if writer:
            writer.close()
    return rows


def _tables_of(generated: GeneratedShards, split: str) -> Iterable[pa.Table]:
    for path in generated.shards:
        with open_rows(path, generated.fingerprint) as shard:
            table = shard.read(columns=[*COLUMNS, "split"])
        table = table.filter(pc.equal(table["split"], split)).select(list(COLUMNS)).replace_schema_metadata(None)
        if len(table):
            yield table


def _renamed(table: pa.Table, names: Mapping[str, str]) -> pa.Table:
    """The rows with the public name of their source in each id."""
    parts = (id.rpartition(":") for id in table["id"].to_pylist())
    ids = [f"{names.get(source, source)}{colon}{row}" for source, colon, row in parts]
    return table.set_column(0, "id", pa.array(ids, pa.string()))


def _not_ours(names: Collection[str]) -> list[str]:
    """The files that conflict with conversations: any other data."""
    return sorted(name for name in names if not OURS.fullmatch(name) and not BESIDE.fullmatch(name))


def _stale(names: Collection[str], kept: Collection[str]) -> list[str]:
    """The files of an earlier push that the new one does not replace: they would be read with it."""
    return sorted(name for name in names if OURS.fullmatch(name) and name not in kept)
