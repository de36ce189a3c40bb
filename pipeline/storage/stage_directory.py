"""Stage directories: `<stage>-<fingerprint[:8]>/` with shards and DONE.json.

A stage directory belongs to one fingerprint: after a change of settings, code or input, the stage
has another directory. The footers of the shards state which shards exist. DONE.json adds the size,
time and sha256 of each file. `verify` reads and compares all files; a run reads only the files
whose time has changed.
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

    To make the result, call `enter`. Then, unless `is_whole` returns True, call `begin`, write the
    files and call `finish`. From `enter` until `lock` is released, the directory is locked against
    changes by other processes.

    Args:
        store: The directory of the stage directories.
        scratch: Names of files and folders of the stage that DONE.json leaves out.
        parts: Names of folders in the directory. If a file in such a folder is damaged, only this
            folder is dropped.
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
        """Return the stage directory at `path`, which may be a copy.

        Its stage and fingerprint come from stage.json. Without that file, the stage is the one
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
        """Create the stage directory, share its lock, and remove temporary files of killed workers.

        Raises:
            DataError: The directory is a link, which in a copied run would lead to the original.
            EnvironmentFault: Another process owns the lock, or the file system has no locks.
        """
        if self.path.is_symlink():
            raise DataError(
                "A stage's directory is a link.",
                self.path,
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

        The caller must hold the lock, since `examine` may update DONE.json.

        Args:
            upstream: The content hash of each upstream stage, by name.
        """
        return self.is_current(upstream) and not self.examine()

    def begin(self, upstream: dict[str, str], *, fresh: bool = False) -> list[Path]:
        """Prepare the stage directory for a run of the stage; return the damaged files.

        The directory is locked exclusively, DONE.json is removed, and `upstream` is recorded. With
        `fresh`, the whole result is dropped and files are not examined. Otherwise damaged files are
        dropped; if the upstream content has changed, everything except the shards is dropped too.
        Shards that are out of date are found by `pending`.

        Args:
            upstream: The content hash of each upstream stage, by name.

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
        """Write DONE.json with the facts of all result files, then share the lock with readers.

        Bookkeeping and scratch files are left out. The facts of a shard come from its note, if it
        has one; all other files are read.

        Args:
            summary: What the stage reports, such as numbers of rows.
            upstream: The content hash of each upstream stage, by name.
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

    @property
    def identity(self) -> Identity:
        """The data that the fingerprint covers; empty if stage.json is absent or damaged."""
        described = Description.read(self.path)
        return described.identity if described else {}

    @property
    def done(self) -> Done | None:
        """The content of DONE.json; None while the stage is unfinished, or if it is damaged."""
        return Done.read(self.path)

    @property
    def summary(self) -> Summary:
        """The summary in DONE.json; empty while the stage is unfinished."""
        done = self.done
        return done.summary if done else {}

    @property
    def content(self) -> str:
        """The content hash of the stage's result (without *.jsonl logs), for downstream stages."""
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
        """Return the paths of the stage's complete shards (see `receipts`), in order."""
        done = self.done
        if done:
            return [self.shard_path(receipt.index) for receipt in done.shards]
        return [self.shard_path(index) for index in sorted(self.receipts())]

    def receipts(self) -> dict[int, Receipt]:
        """Return the receipts of the stage's complete shards, by index.

        A shard is complete if it has a receipt with this fingerprint, and a quarantine file. Others
        are skipped.
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
        """Return the paths of all Parquet files in the shard folder, sorted."""
        return sorted((self.path / "shards").glob("*.parquet"))

    def task(self, index: int) -> ShardTask:
        """Return the task of making a shard that has no upstream shard."""
        shard, quarantine = self.shard_path(index), self.quarantine_path(index)
        return ShardTask(index, shard, quarantine, self.fingerprint)

    def tasks(self, upstream: StageDirectory, receipts: dict[int, Receipt]) -> list[ShardTask]:
        """Return a task for each shard of the stage `upstream`, in order.

        `receipts` are the receipts of `upstream`.
        """
        tasks = []
        for index, receipt in sorted(receipts.items()):
            source, content = upstream.shard_path(index), receipt.content_sha256
            tasks.append(replace(self.task(index), source=source, upstream=content))
        return tasks

    def pending(self, tasks: Sequence[ShardTask], receipts: dict[int, Receipt]) -> list[ShardTask]:
        """Return the tasks whose shard is missing or was made from another upstream shard.

        `receipts` are this stage's receipts.
        """
        pending = []
        for task in tasks:
            receipt = receipts.get(task.index)
            if receipt is None or receipt.upstream != task.upstream:
                pending.append(task)
        return pending

    def drop_shards_but(self, indices: Collection[int]) -> dict[int, Receipt]:
        """Delete complete shards whose index is not in `indices`; return the others' receipts."""
        kept = {}
        for index, receipt in self.receipts().items():
            if index in indices:
                kept[index] = receipt
            else:
                self._drop_shard(self.shard_path(index).stem)
        return kept

    # Damage

    def is_current(self, upstream: dict[str, str]) -> bool:
        """Return whether DONE.json exists and has this fingerprint and this upstream content.

        No other file is read.
        """
        done = self.done
        if done is None:
            return False
        return done.fingerprint == self.fingerprint and done.upstream == upstream

    def resized_files(self) -> list[Path]:
        """Return the recorded files that are missing or of another size; none is read."""
        return [path for path, facts in self._file_facts().items() if not facts.fit(path)]

    def examine(self) -> list[Path]:
        """Return the recorded files that are missing or changed, except the stage's *.jsonl logs.

        A file is read only if its time differs from the recorded one. If its content is the same,
        the new time is stored in DONE.json (if the stage is finished), so that the file is not read
        again. The caller must hold the lock.
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

        A damaged shard is dropped with its quarantine file and its note, a damaged file in a folder
        of `parts` with the folder. If any other file is damaged, everything but the shards is
        dropped.
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

    def verify(self) -> list[str]:
        """Read the recorded files, or the shards of an unfinished stage; return the problems found.

        Each problem is a message.

        Raises:
            EnvironmentFault: A file cannot be read, for example without permission.
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
        """Read all shards of an unfinished stage; return one message per problem."""
        problems = []
        for path in self.parquet_files():
            receipt = read_receipt(path)
            if receipt is None or receipt.fingerprint != self.fingerprint:
                problems.append(f"{path} belongs to another run, or is damaged")
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
        """Return the recorded facts by path: from DONE.json, else from the notes of the shards."""
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
        """Remove everything in the stage directory except stage.json, the lock and `keep`."""
        for path in self.path.iterdir():
            if path.name not in (STAGE_FILE, LOCK_FILE, *keep):
                remove(path)
