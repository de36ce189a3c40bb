"""Held-out rows that equal training rows, which accuracies and rates must not be measured on."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from pathlib import Path

from pipeline.artifacts.generated_rows import GENERATED, counts_of, read_token_rows
from pipeline.conversations.conversation import Reason, RejectedRow
from pipeline.storage.receipts import read_receipt
from pipeline.storage.shard_folder import ShardFolder
from pipeline.storage.shards import ShardWriter, read_rows


def quarantine_trained_on(folder: ShardFolder) -> int:
    """Quarantine the held-out rows of the generated shards whose tokens are those of a training row.

    Seeds are unique, and yet rows may agree: where a template leaves out what tells two seeds apart, or the rounds end
    before it. Each shard is written again by one rename, so that an interrupted call is made good by the next one.

    Returns their number.
    """
    trained: set[bytes] = set()
    held_out: dict[Path, dict[str, bytes]] = defaultdict(dict)  # the tokens' digests by row, by shard
    for path in folder.shards():
        for row in read_token_rows([path], folder.fingerprint):
            digest = hashlib.sha256(row.input_ids.tobytes()).digest()
            if row.split == "train":
                trained.add(digest)
            else:
                held_out[path][row.id] = digest
    found = {path: {row for row, digest in rows.items() if digest in trained} for path, rows in held_out.items()}
    for path, leaking in found.items():
        if leaking:
            _quarantine(path, leaking)
    return sum(map(len, found.values()))


def _quarantine(path: Path, ids: set[str]) -> None:
    """Write a shard again without these rows, which its quarantine file then has."""
    receipt = read_receipt(path)
    assert receipt is not None, "its rows have just been read"
    quarantine = path.parent.with_name("quarantine") / f"{path.stem}.jsonl"
    before = [json.loads(line) for line in quarantine.read_text(encoding="utf-8").splitlines()]
    rows = list(read_rows(path))
    kept = [row for row in rows if row["id"] not in ids]
    with ShardWriter(
        path,
        quarantine,
        GENERATED,
        index=receipt.index,
        fingerprint=receipt.fingerprint,
        upstream=receipt.upstream,
    ) as writer:
        writer.write(kept)
        for row in before:
            writer.reject(RejectedRow(row["id"], Reason(row["reason"]), row["detail"], row["row"]))
        for row in rows:
            if row["id"] in ids:
                detail = "Its tokens are those of a row of the split `train`."
                writer.reject(RejectedRow(row["id"], Reason.TRAINED_ON, detail, dict(row)))
        ids_in = {row["id"] for row in before} | {row["parent_id"] for row in rows}
        writer.commit(
            "generate", ids_in, receipt.stats | counts_of(kept), receipt.note.busy_seconds if receipt.note else 0.0
        )
