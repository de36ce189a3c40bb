"""One stage's directory: `<stage>-<fingerprint[:8]>/` with its shards and DONE.json.

A stage directory belongs to one fingerprint: a changed meaning gets another directory. Which shards
exist is read from their footers. DONE.json adds each file's size, time and sha256: `verify`
compares all files with it, and a run those whose modification time has changed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import DataError
from pipeline.storage.atomic import disk_errors, read_json, remove, sweep_temporary, write_json
from pipeline.storage.checksums import FileFacts
from pipeline.storage.description import Description
from pipeline.storage.done import Done, Identity, Summary
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.locks import Lock
from pipeline.storage.receipts import read_note, write_note
from pipeline.storage.shard_folder import ShardFolder

SHARD_FOLDERS = ("shards", "quarantine", "receipts")
BOOKKEEPING = (
    "stage.json",
    "upstream.json",
    "DONE.json",
    "lock",
    "receipts",
    "attempts",
    "isolation",
)


class StageDirectory(ShardFolder):
    """The directory of one stage of one fingerprint.

    Whoever makes the result calls `enter`, then, unless it `is_whole`, `begin` and `finish`. From
    `enter` until `release` the directory is held against being changed by others.

    Args:
        store: Where stage directories lie.
        scratch: Names of files and folders in it that do not count once the stage is done.
        parts: Folders in it that are made again alone when one of their files is damaged.
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
        super().__init__(store / f"{stage}-{fingerprint[:8]}", fingerprint)
        self.stage, self.parts = stage, parts
        self.uncounted = {*BOOKKEEPING, *scratch}

    @classmethod
    def at(cls, path: Path) -> StageDirectory:
        """The stage directory at `path`, also where it was copied."""
        described = Description.read(path) or Description(path.name.rpartition("-")[0], "")
        stage = cls(path.parent, described.stage, described.fingerprint)
        stage.path = path
        return stage

    @functools.cached_property
    def lock(self) -> Lock:
        """The directory's lock, not yet held."""
        return Lock(self.path / "lock", f"the {self.stage} stage")

    def enter(self, identity: Identity) -> None:
        """Make the directory, write what it depends on, and hold it; remove killed workers'
        leftovers.

        Raises:
            DataError: It is a link: in a copied run it would lead to the original's stage.
            EnvironmentFault: Another process changes it.
        """
        if self.path.is_symlink():
            fix = "Delete this link and run again; to store stages elsewhere, set run.store."
            raise DataError("A stage's directory is a link.", str(self.path), fix)
        self.create(identity)
        self.lock.share()
        for folder in SHARD_FOLDERS:
            sweep_temporary(self.path / folder)

    def create(self, identity: Identity) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        Description(self.stage, self.fingerprint, identity).write(self.path)

    def is_whole(self, upstream: dict[str, str]) -> bool:
        """Whether the stage is finished, made from this upstream content, and no file is
        damaged.
        """
        return self.is_current(upstream) and not self.examine()

    def begin(self, upstream: dict[str, str], *, fresh: bool = False) -> list[Path]:
        """Hold the directory alone, drop what cannot be kept, and return the damaged files.

        Dropped is all of it if `fresh`, what is damaged, and what has another upstream; shards name
        their upstream shard one by one and are kept where it is unchanged.

        Raises:
            EnvironmentFault: Another process holds the directory.
        """
        self.lock.own()
        damaged = [] if fresh else self.examine()
        self.discard(damaged)
        sweep_temporary(self.path)
        if fresh:
            self._drop()
        elif read_json(self.path / "upstream.json") != upstream:
            self._drop(keep=SHARD_FOLDERS)
        write_json(self.path / "upstream.json", upstream)
        return damaged

    def release(self) -> None:
        if "lock" in self.__dict__:
            self.lock.release()

    @property
    def identity(self) -> Identity:
        """What the result depends on; empty where stage.json is damaged."""
        described = Description.read(self.path)
        return described.identity if described else {}

    @property
    def done(self) -> Done | None:
        """DONE.json's content, or None while the stage is unfinished."""
        return Done.read(self.path)

    @property
    def summary(self) -> Summary:
        """What the stage says of itself; empty while it is unfinished."""
        done = self.done
        return done.summary if done else {}

    def shards(self) -> list[Path]:
        """The shards of the finished stage, in order; while it is unfinished, those that are
        whole.
        """
        done = self.done
        if done is None:
            return super().shards()
        return [self.shard_path(receipt.index) for receipt in done.shards]

    def files_below(self, folder: str) -> dict[str, FileFacts]:
        """The finished stage's files in one folder, by their path in it."""
        done = self.done
        files = done.files if done else {}
        prefix = f"{folder}/"
        found = {}
        for name, facts in files.items():
            if name.startswith(prefix):
                found[name.removeprefix(prefix)] = facts
        return found

    def finish(self, summary: Summary, upstream: dict[str, str]) -> None:
        """Write DONE.json: the summary, what it was made from, and the facts of every file.

        Shards are not read: their notes have their sha256. From then on others may hold the
        directory too.
        """
        by_index = self.receipts()
        receipts = [by_index[index] for index in sorted(by_index)]
        known = {}
        for receipt in receipts:
            if receipt.note:
                known[self.shard_path(receipt.index)] = receipt.note.file
        files = {}
        for path in self._result_files():
            files[str(path.relative_to(self.path))] = known.get(path) or FileFacts.of(path)
        Done(self.stage, self.fingerprint, upstream, receipts, files, summary).write(self.path)
        if "lock" in self.__dict__:
            self.lock.share()  # other runs may read it while this one goes on

    @property
    def content(self) -> str:
        """A hash of what the stage made, without logs (*.jsonl); dependants are stale when it
        changes.
        """
        done = self.done
        if done and done.shards:
            return fingerprint({"made": [receipt.content_sha256 for receipt in done.shards]})
        made = {}
        for name, facts in done.files.items() if done else ():
            if not name.endswith(".jsonl"):
                made[name] = facts.sha256
        return fingerprint({"made": made})

    def is_current(self, upstream: dict[str, str]) -> bool:
        """Whether the stage is finished and was made from this upstream content."""
        done = self.done
        return (
            done is not None and done.fingerprint == self.fingerprint and done.upstream == upstream
        )

    def misfits(self) -> list[Path]:
        """The files that count and are missing or of another size; nothing is read."""
        return [path for path, facts in self._facts().items() if not facts.fit(path)]

    def examine(self) -> list[Path]:
        """The files that are missing or changed; only those with another modification time are
        read.

        The new time of an unchanged file is stored, so that it is not read again. The caller holds
        the lock.
        """
        damaged, touched = [], {}
        for path, facts in self._facts().items():
            found = facts.renewed(path)
            is_log = path.suffix == ".jsonl" and path.parent == self.path
            if found is None and not is_log:  # no run makes a log again
                damaged.append(path)
            elif found and found != facts:
                touched[path] = found
        self._remember(touched)
        return damaged

    def _remember(self, touched: dict[Path, FileFacts]) -> None:
        """Store the new modification times of unchanged files."""
        done = self.done
        if done and touched:
            files = {str(path.relative_to(self.path)): facts for path, facts in touched.items()}
            replace(done, files={**done.files, **files}).write(self.path)
        else:
            for path, facts in touched.items():
                note = read_note(path)
                if note:
                    write_note(path, replace(note, file=facts))

    def discard(self, damaged: Sequence[Path]) -> None:
        """Hold the directory alone, forget that the stage is done, and drop what is damaged.

        A shard goes with its quarantine file and is made again alone, and so is a folder of
        `parts`. Any other file takes all but the shards along.
        """
        self.lock.own()
        (self.path / "DONE.json").unlink(missing_ok=True)
        for path in damaged:
            if path.parent.name in ("shards", "quarantine"):
                self.drop_shard(self.path / "shards" / f"{path.stem}.parquet")
            elif path.parent.name in self.parts:
                remove(path.parent)
            else:
                self._drop(keep=SHARD_FOLDERS)

    def intact(self, name: str) -> bool:
        """Whether one file is as it was written, such as a log, which no run makes again."""
        done = self.done
        facts = done.files.get(name) if done else None
        return facts is not None and facts.renewed(self.path / name) is not None

    def verify(self) -> list[str]:
        """Read every file again and return what is missing or damaged, one line each.

        Raises:
            EnvironmentFault: This user may not read them.
        """
        record = self.path / "DONE.json"
        problems = []
        with disk_errors(self.path):
            if self.done is None:
                problems += self.shard_problems()
                if record.exists():
                    problems.append(f"{record} is damaged: it holds no record of a finished stage")
            else:
                for path, facts in self._facts().items():
                    problems += facts.problems(path)
        return problems

    def _facts(self) -> dict[Path, FileFacts]:
        """The facts of all files: from DONE.json, or while unfinished from the shards' notes."""
        done = self.done
        if done:
            return {self.path / name: facts for name, facts in done.files.items()}
        facts = {}
        for path in self.parquet_files():
            note = read_note(path)
            if note:
                facts[path] = note.file
        return facts

    def _drop(self, keep: Sequence[str] = ()) -> None:
        """Remove what was made; what the directory is for stays."""
        for path in self.path.iterdir():
            if path.name not in ("stage.json", "lock", *keep):
                remove(path)

    def _result_files(self) -> list[Path]:
        """Every file but bookkeeping, scratch, and what an orphan is still writing."""
        files = []
        for path in sorted(self.path.rglob("*")):
            is_counted = not self.uncounted.intersection(path.relative_to(self.path).parts)
            if is_counted and path.is_file() and path.suffix != ".tmp":
                files.append(path)
        return files
