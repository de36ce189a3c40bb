"""The shards of one stage directory: which are whole, which are still to be made, which belong to another run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from pipeline.errors import DamagedShard
from pipeline.storage.receipts import Receipt, note_path, read_receipt
from pipeline.storage.shards import read_rows
from pipeline.storage.tasks import ShardTask


class ShardFolder:
    """The shards in `path`, of which those of `fingerprint` count."""

    def __init__(self, path: Path, fingerprint: str):
        self.path, self.fingerprint = path, fingerprint

    def shard_path(self, index: int) -> Path:
        return self.path / "shards" / f"{index:05d}.parquet"

    def quarantine_path(self, index: int) -> Path:
        return self.path / "quarantine" / f"{index:05d}.jsonl"

    def shards(self) -> list[Path]:
        """The committed shards, in order."""
        return sorted((self.path / "shards").glob("*.parquet"))

    def receipts(self) -> dict[int, Receipt]:
        """The receipts of whole shards of this fingerprint; damaged and foreign files are as if absent."""
        found = ((path, read_receipt(path)) for path in self.shards())
        return {
            receipt.index: receipt
            for path, receipt in found
            if receipt
            and receipt.fingerprint == self.fingerprint
            and (receipt.note is None or receipt.note.file.fit(path))
            and self.quarantine_path(receipt.index).exists()
        }

    def tasks(self, upstream: ShardFolder, receipts: dict[int, Receipt] | None = None) -> list[ShardTask]:
        """One task per upstream shard; `receipts` is what `upstream.receipts` has just said."""
        return [
            ShardTask(
                index=index,
                source=str(upstream.shard_path(index)),
                upstream=receipt.content_sha256,
                shard=str(self.shard_path(index)),
                quarantine=str(self.quarantine_path(index)),
                fingerprint=self.fingerprint,
            )
            for index, receipt in sorted((upstream.receipts() if receipts is None else receipts).items())
        ]

    def pending(self, tasks: Sequence[ShardTask], have: dict[int, Receipt] | None = None) -> list[ShardTask]:
        """The tasks whose shard does not exist, or was made from other upstream content.

        `have` is what `receipts` has just said; without it every footer is read again.
        """
        have = self.receipts() if have is None else have
        return [task for task in tasks if task.index not in have or have[task.index].upstream != task.upstream]

    def drop_shards_but(self, indices: Collection[int]) -> None:
        """Drop our shards of indices that upstream has no longer, whole or damaged; another run's are not ours."""
        wanted = {self.shard_path(index) for index in indices}
        for path in self.shards():
            receipt = read_receipt(path) if path not in wanted else None
            if path not in wanted and (receipt is None or receipt.fingerprint == self.fingerprint):
                self.drop_shard(path)

    def drop_shard(self, shard: Path) -> None:
        """Remove a shard with its quarantine file and its note."""
        for path in (shard.parent.parent / "quarantine" / f"{shard.stem}.jsonl", note_path(shard), shard):
            path.unlink(missing_ok=True)

    def foreign_or_unreadable(self, written: Collection[Path], *, finished: bool) -> dict[Path, str | None]:
        """What is wrong with files among the shards that are not `written`, by path; reads those without a note."""
        problems: dict[Path, str | None] = {}
        for path in self.shards():
            receipt, rows = read_receipt(path), self.path / "quarantine" / f"{path.stem}.jsonl"
            if receipt is None or receipt.fingerprint != self.fingerprint or (finished and path not in written):
                problems[path] = f"{path} is of another run, or damaged"
            elif path not in written:  # its writer was killed before the note
                problems[path] = _unreadable(path)
            if not finished and not rows.is_file():
                problems[rows] = f"{rows} is missing"
        return problems


def _unreadable(path: Path) -> str | None:
    """What reading all of a shard finds: its pages have checksums."""
    try:
        for _ in read_rows(path):
            pass
    except DamagedShard as damaged:
        return f"{path} is damaged: {damaged.what}"
    return None
