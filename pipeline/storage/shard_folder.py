"""The shards of one stage directory: which are whole, and which are still to be made."""

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
        """The whole shards, in order."""
        return [self.shard_path(index) for index in sorted(self.receipts())]

    def receipts(self) -> dict[int, Receipt]:
        """The receipts of whole shards of this fingerprint; damaged and foreign files are as if
        absent.
        """
        receipts = {}
        for path in self.parquet_files():
            receipt = read_receipt(path)
            if receipt is None or receipt.fingerprint != self.fingerprint:
                continue
            has_other_size = receipt.note is not None and not receipt.note.file.fit(path)
            if not has_other_size and self.quarantine_path(receipt.index).exists():
                receipts[receipt.index] = receipt
        return receipts

    def tasks(
        self, upstream: ShardFolder, receipts: dict[int, Receipt] | None = None
    ) -> list[ShardTask]:
        """One task per upstream shard; `receipts` is what `upstream.receipts` has just returned."""
        if receipts is None:
            receipts = upstream.receipts()
        return [
            ShardTask(
                index=index,
                source=str(upstream.shard_path(index)),
                upstream=receipt.content_sha256,
                shard=str(self.shard_path(index)),
                quarantine=str(self.quarantine_path(index)),
                fingerprint=self.fingerprint,
            )
            for index, receipt in sorted(receipts.items())
        ]

    def pending(
        self, tasks: Sequence[ShardTask], have: dict[int, Receipt] | None = None
    ) -> list[ShardTask]:
        """The tasks whose shard does not exist, or was made from other upstream content.

        `have` is what `receipts` has just returned; without it every footer is read again.
        """
        if have is None:
            have = self.receipts()
        return [
            task
            for task in tasks
            if task.index not in have or have[task.index].upstream != task.upstream
        ]

    def drop_shards_but(self, indices: Collection[int]) -> dict[int, Receipt]:
        """Drop the shards of indices that upstream no longer has; returns the receipts of the
        others.
        """
        kept = {}
        for index, receipt in self.receipts().items():
            if index in indices:
                kept[index] = receipt
            else:
                self.drop_shard(self.shard_path(index))
        return kept

    def drop_shard(self, shard: Path) -> None:
        """Remove a shard with its quarantine file and its note."""
        quarantine = self.path / "quarantine" / f"{shard.stem}.jsonl"
        for path in (quarantine, note_path(shard), shard):
            path.unlink(missing_ok=True)

    def shard_problems(self) -> list[str]:
        """What is wrong with the shards of an unfinished stage, one line each; all of them are
        read.
        """
        problems = []
        for path in self.parquet_files():
            receipt = read_receipt(path)
            if receipt is None or receipt.fingerprint != self.fingerprint:
                problems.append(f"{path} is of another run, or damaged")
            elif receipt.note is None:  # its writer was killed before it
                problems += _unreadable(path)
            else:
                problems += receipt.note.file.problems(path)
            quarantine = self.path / "quarantine" / f"{path.stem}.jsonl"
            if not quarantine.exists():
                problems.append(f"{quarantine} is missing")
        return problems

    def parquet_files(self) -> list[Path]:
        """Every Parquet file among the shards, whatever it is."""
        return sorted((self.path / "shards").glob("*.parquet"))


def _unreadable(path: Path) -> list[str]:
    """What reading all of a shard finds: its pages have checksums."""
    try:
        for _ in read_rows(path):
            pass
    except DamagedShard as damaged:
        return [f"{path} is damaged: {damaged.what}"]
    return []
