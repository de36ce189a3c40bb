"""Stage directories: `<stage>-<fingerprint[:8]>/` with shards and DONE.json.

A stage directory belongs to one fingerprint: a changed meaning gets another directory. Which shards
exist is read from their footers. DONE.json adds each file's size, time and sha256.
`verify` reads and compares all files; a run reads only those whose time has changed.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import DamagedShard, DataError
from pipeline.storage.atomic import disk_errors, read_json, remove, sweep_temporary, write_json
from pipeline.storage.fingerprint import FileFacts, fingerprint
from pipeline.storage.locks import Lock
from pipeline.storage.receipts import (
    DONE_FILE,
    STAGE_FILE,
    Description,
    Done,
    Identity,
    Receipt,
    Summary,
    note_path,
    read_note,
    read_receipt,
)
from pipeline.storage.shards import ShardTask, read_rows

SHARD_FOLDERS = ("shards", "quarantine", "receipts")
UPSTREAM_FILE, LOCK_FILE = "upstream.json", "lock"
BOOKKEEPING = (
    STAGE_FILE,
    UPSTREAM_FILE,
    DONE_FILE,
    LOCK_FILE,
    "receipts",
    "attempts",
    "isolation",
)


class StageDirectory:
    """The directory of one stage's result, for one fingerprint.

    To make the result, call `enter`, then, unless it `is_whole`, `begin` and `finish`. From `enter`
    until `release` the directory is locked against changes by others.

    Args:
        store: The directory of the stage directories.
        scratch: Names of files and folders in it that DONE.json leaves out.
        parts: Folders in it that are dropped alone when one of their files is damaged.
    """

    def __init__(
        self,
        store: Path,
        stage: str,
        fingerprint: str,
        *,
        scratch: Sequence[str] = (),
        parts: Sequence[str] = (),
    ):
        self.path = store / f"{stage}-{fingerprint[:8]}"
        self.stage, self.fingerprint, self.parts = stage, fingerprint, parts
        self.uncounted = {*BOOKKEEPING, *scratch}

    @classmethod
    def at(cls, path: Path) -> StageDirectory:
        """Return the stage directory at `path`, which may be a copied one.

        Its stage and fingerprint are those of stage.json. Without that file, the stage is the one
        in the directory's name and the fingerprint is empty.
        """
        described = Description.read(path) or Description(path.name.rpartition("-")[0], "")
        stage = cls(path.parent, described.stage, described.fingerprint)
        stage.path = path
        return stage

    @functools.cached_property
    def lock(self) -> Lock:
        """The lock of the stage directory; the first access opens its file without locking it."""
        return Lock(self.path / LOCK_FILE, f"the {self.stage} stage")

    def enter(self, identity: Identity) -> None:
        """Create the stage directory, share its lock, and remove files of killed workers.

        Raises:
            DataError: It is a link: in a copied run it would lead to the original's stage.
            EnvironmentFault: Another process owns the lock, or the file system has no locks.
        """
        if self.path.is_symlink():
            raise DataError(
                "A stage's directory is a link.",
                str(self.path),
                "Delete this link and run again; to store stages elsewhere, set run.store.",
            )
        self.create(identity)
        self.lock.share()
        for folder in SHARD_FOLDERS:
            sweep_temporary(self.path / folder)

    def create(self, identity: Identity) -> None:
        """Create the stage directory with its stage.json."""
        self.path.mkdir(parents=True, exist_ok=True)
        Description(self.stage, self.fingerprint, identity).write(self.path)

    def is_whole(self, upstream: dict[str, str]) -> bool:
        """Return whether the stage is finished, made from this upstream content, and undamaged.

        The caller holds the lock, since `examine` may update DONE.json.
        """
        return self.is_current(upstream) and not self.examine()

    def begin(self, upstream: dict[str, str], *, fresh: bool = False) -> list[Path]:
        """Lock the stage directory exclusively, drop damaged and stale files, return the damaged.

        DONE.json is removed, and the upstream content recorded. With `fresh`, the whole result is
        dropped and no damage is looked for. Otherwise damaged files are dropped. If the upstream
        content has changed, everything but the shards is dropped as well; `pending` compares the
        shards with their upstream shards one by one.

        Raises:
            EnvironmentFault: Another process holds the lock, or the file system has no locks.
        """
        self.lock.own()
        damaged = []
        if not fresh:
            damaged = self.examine()
        self.discard(damaged)
        sweep_temporary(self.path)
        if fresh:
            self._drop_result()
        elif read_json(self.path / UPSTREAM_FILE) != upstream:
            self._drop_result(keep=SHARD_FOLDERS)
        write_json(self.path / UPSTREAM_FILE, upstream)
        return damaged

    def finish(self, summary: Summary, upstream: dict[str, str]) -> None:
        """Write DONE.json (summary, upstream content, facts of the files), and share the lock.

        Bookkeeping and scratch files are left out. A shard is read only if it has no note, which
        would have its sha256.
        """
        by_index = self.receipts()
        receipts = [by_index[index] for index in sorted(by_index)]
        known = {}
        for receipt in receipts:
            if receipt.note:
                known[self.shard_path(receipt.index)] = receipt.note.file
        files = {}
        for path in sorted(self.path.rglob("*")):
            is_counted = not self.uncounted.intersection(path.relative_to(self.path).parts)
            if is_counted and path.is_file() and path.suffix != ".tmp":  # of an orphan
                files[str(path.relative_to(self.path))] = known.get(path) or FileFacts.of(path)
        Done(self.stage, self.fingerprint, upstream, receipts, files, summary).write(self.path)
        self.lock.share()

    def release(self) -> None:
        """Release the lock of the stage directory."""
        self.lock.release()

    @property
    def identity(self) -> Identity:
        """The stage directory's fingerprinted identity; empty if stage.json is damaged."""
        described = Description.read(self.path)
        return described.identity if described else {}

    @property
    def done(self) -> Done | None:
        """The record DONE.json, or None while the stage is unfinished."""
        return Done.read(self.path)

    @property
    def summary(self) -> Summary:
        """The summary in DONE.json; empty while the stage is unfinished."""
        done = self.done
        return done.summary if done else {}

    @property
    def content(self) -> str:
        """The hash of the stage's result, without logs (*.jsonl); later stages depend on it."""
        done = self.done
        if done and done.shards:
            return fingerprint({"made": [receipt.content_sha256 for receipt in done.shards]})
        made = {}
        for path, facts in self._file_facts().items():
            if path.suffix != ".jsonl":
                made[str(path.relative_to(self.path))] = facts.sha256
        return fingerprint({"made": made})

    def files_below(self, folder: str) -> dict[str, FileFacts]:
        """Return the facts of a finished stage's files below a folder, by path in that folder."""
        prefix = f"{folder}/"
        found = {}
        for path, facts in self._file_facts().items():
            name = str(path.relative_to(self.path))
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = facts
        return found

    # Shards

    def shard_path(self, index: int) -> Path:
        """Return the path of a shard in the stage directory."""
        return self.path / "shards" / f"{index:05d}.parquet"

    def quarantine_path(self, index: int) -> Path:
        """Return the path of a shard's quarantine file in the stage directory."""
        return self.path / "quarantine" / f"{index:05d}.jsonl"

    def shards(self) -> list[Path]:
        """Return the paths of the stage's whole shards, in order."""
        done = self.done
        if done:
            return [self.shard_path(receipt.index) for receipt in done.shards]
        return [self.shard_path(index) for index in sorted(self.receipts())]

    def receipts(self) -> dict[int, Receipt]:
        """Read the receipts of the stage's whole shards, by index; skip foreign files.

        A shard is whole if it has a receipt of this fingerprint and a quarantine file.
        """
        receipts = {}
        for path in self.parquet_files():
            receipt = read_receipt(path)
            if receipt is None or receipt.fingerprint != self.fingerprint:
                continue
            if self.quarantine_path(receipt.index).exists():
                receipts[receipt.index] = receipt
        return receipts

    def parquet_files(self) -> list[Path]:
        """Return all Parquet files in the shard folder, whole or not."""
        return sorted((self.path / "shards").glob("*.parquet"))

    def task(self, index: int) -> ShardTask:
        """Return the task of making a shard that has no upstream shard."""
        shard, quarantine = self.shard_path(index), self.quarantine_path(index)
        return ShardTask(index, shard, quarantine, self.fingerprint)

    def tasks(self, upstream: StageDirectory, receipts: dict[int, Receipt]) -> list[ShardTask]:
        """Return one shard task per upstream shard; `receipts` are those of `upstream`."""
        tasks = []
        for index, receipt in sorted(receipts.items()):
            source, content = upstream.shard_path(index), receipt.content_sha256
            tasks.append(replace(self.task(index), source=source, upstream=content))
        return tasks

    def pending(self, tasks: Sequence[ShardTask], receipts: dict[int, Receipt]) -> list[ShardTask]:
        """Return the tasks whose shard is missing or was made from other upstream content."""
        pending = []
        for task in tasks:
            receipt = receipts.get(task.index)
            if receipt is None or receipt.upstream != task.upstream:
                pending.append(task)
        return pending

    def drop_shards_but(self, indices: Collection[int]) -> dict[int, Receipt]:
        """Drop the whole shards of all other indices; return the receipts of the shards kept."""
        kept = {}
        for index, receipt in self.receipts().items():
            if index in indices:
                kept[index] = receipt
            else:
                self._drop_shard(self.shard_path(index).stem)
        return kept

    # Damage

    def is_current(self, upstream: dict[str, str]) -> bool:
        """Return whether the stage is finished and was made from this upstream content.

        DONE.json decides; no other file is looked at.
        """
        done = self.done
        if done is None:
            return False
        return done.fingerprint == self.fingerprint and done.upstream == upstream

    def resized_files(self) -> list[Path]:
        """Return the stage's files that are missing or of another size, without reading them."""
        return [path for path, facts in self._file_facts().items() if not facts.fit(path)]

    def examine(self) -> list[Path]:
        """Return the stage's files that are missing or changed; read only those with another time.

        The stage's logs (*.jsonl) do not count. The new time of an unchanged file is stored in
        DONE.json, so that the file is not read again. The caller holds the lock.
        """
        damaged, touched = [], {}
        for path, facts in self._file_facts().items():
            found = facts.renewed(path)
            is_log = path.suffix == ".jsonl" and path.parent == self.path
            if found is None and not is_log:  # no run makes a log again
                damaged.append(path)
            elif found and found != facts:
                touched[path] = found
        done = self.done
        if done and touched:
            files = dict(done.files)
            for path, facts in touched.items():
                files[str(path.relative_to(self.path))] = facts
            replace(done, files=files).write(self.path)
        return damaged

    def discard(self, damaged: Sequence[Path]) -> None:
        """Lock the stage directory exclusively, remove DONE.json, and drop damaged files.

        A damaged shard is dropped with its quarantine file, a damaged file in a folder of `parts`
        with the folder. Any other damaged file drops everything but the shards.
        """
        self.lock.own()
        (self.path / DONE_FILE).unlink(missing_ok=True)
        for path in damaged:
            if path.parent.name in SHARD_FOLDERS:
                self._drop_shard(path.stem)
            elif path.parent.name in self.parts:
                remove(path.parent)
            else:
                self._drop_result(keep=SHARD_FOLDERS)

    def intact(self, name: str) -> bool:
        """Return whether the stage has recorded a file of this relative path that is unchanged."""
        facts = self._file_facts().get(self.path / name)
        return facts is not None and facts.renewed(self.path / name) is not None

    def verify(self) -> list[str]:
        """Read a stage's recorded files, or its shards if unfinished; return a line per problem.

        Raises:
            EnvironmentFault: A file cannot be read, such as without permission.
        """
        problems = []
        with disk_errors(self.path):
            if self.done is None:
                problems += self._shard_problems()
                if (self.path / DONE_FILE).exists():
                    problems.append(f"{self.path / DONE_FILE} is damaged")
            else:
                for path, facts in self._file_facts().items():
                    problems += facts.problems(path)
        return problems

    def _shard_problems(self) -> list[str]:
        """Read the shards of an unfinished stage and return one line per problem."""
        problems = []
        for path in self.parquet_files():
            receipt = read_receipt(path)
            if receipt is None or receipt.fingerprint != self.fingerprint:
                problems.append(f"{path} is of another run, or damaged")
            elif receipt.note:
                problems += receipt.note.file.problems(path)
            else:  # its writer was killed before the note; the pages have checksums
                try:
                    deque(read_rows(path), maxlen=0)
                except DamagedShard as damaged:
                    problems.append(f"{path} is damaged: {damaged.what}")
            quarantine = self.path / "quarantine" / f"{path.stem}.jsonl"
            if not quarantine.exists():
                problems.append(f"{quarantine} is missing")
        return problems

    def _file_facts(self) -> dict[Path, FileFacts]:
        """Return the facts of the stage's files: from DONE.json, else from the shards' notes."""
        done = self.done
        facts = {}
        if done:
            for name, of_file in done.files.items():
                facts[self.path / name] = of_file
            return facts
        for path in self.parquet_files():
            note = read_note(path)
            if note:
                facts[path] = note.file
        return facts

    def _drop_shard(self, stem: str) -> None:
        """Remove a shard's quarantine file, then its note, then the shard itself."""
        shard = self.path / "shards" / f"{stem}.parquet"
        for path in (self.path / "quarantine" / f"{stem}.jsonl", note_path(shard), shard):
            path.unlink(missing_ok=True)

    def _drop_result(self, keep: Sequence[str] = ()) -> None:
        """Remove everything in the stage directory but stage.json, the lock and `keep`."""
        for path in self.path.iterdir():
            if path.name not in (STAGE_FILE, LOCK_FILE, *keep):
                remove(path)
