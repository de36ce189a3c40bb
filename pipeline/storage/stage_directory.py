"""One stage's directory: `<stage>-<fingerprint[:8]>/` with its shards, their quarantine files, and DONE.json.

A stage directory belongs to one fingerprint: a changed meaning gets another directory. Which shards exist is read from
their footers. DONE.json adds each file's size, time and sha256: `verify` compares all files with it, and a run those
whose modification time has changed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from pipeline.errors import DataError
from pipeline.storage.atomic import disk_errors, is_text, links_in, read_json, remove, sweep_temporary, write_json
from pipeline.storage.checksums import FileFacts
from pipeline.storage.description import Description
from pipeline.storage.done import Done, Identity, Summary
from pipeline.storage.fingerprint import fingerprint
from pipeline.storage.locks import Lock
from pipeline.storage.receipts import read_note, write_note
from pipeline.storage.shard_folder import ShardFolder

SHARD_FOLDERS = ("shards", "quarantine", "receipts")
BOOKKEEPING = ("stage.json", "upstream.json", "DONE.json", "lock", "receipts", "attempts", "isolation")


class StageDirectory(ShardFolder):
    """The directory of one stage of one fingerprint.

    Whoever makes the result calls `enter`, then, unless it `is_whole`, `begin` and `finish`. From `enter` on the
    directory is held against being changed by others, until `release`.

    Args:
        store: Where stage directories lie.
        scratch: Names of files and folders in it that do not count once the stage is done.
        parts: Folders in it that are made again alone when one of their files is damaged.
        may_link: Folders of `scratch` in which another program keeps links of its own; nothing here writes to them.
    """

    def __init__(
        self,
        store: Path,
        stage: str,
        fingerprint: str,
        *,
        scratch: Sequence[str] = (),
        parts: Sequence[str] = (),
        may_link: Sequence[str] = (),
    ):
        super().__init__(store / f"{stage}-{fingerprint[:8]}", fingerprint)
        self.stage = stage
        self.uncounted, self.parts, self.may_link = {*BOOKKEEPING, *scratch}, parts, may_link

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
        """Make the directory, say in stage.json what it depends on, and hold it; leftovers of killed workers go.

        Raises:
            DataError: A link lies in it, and following it could change or delete what is not the stage's.
            EnvironmentFault: Another process changes it.
        """
        if link := self.path if self.path.is_symlink() else next(links_in(self.path, self.may_link), None):
            fix = "Delete this link and run the same command again; to store a stage elsewhere, set run.store."
            raise DataError("A link leads out of the stage's directory.", str(link), fix)
        self.create(identity)
        self.lock.share()
        for folder in SHARD_FOLDERS:
            sweep_temporary(self.path / folder)

    def create(self, identity: Identity) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        Description(self.stage, self.fingerprint, identity).write(self.path)

    def is_whole(self, upstream: dict[str, str]) -> bool:
        """Whether the stage is finished, was made from this upstream content, and no file is damaged.

        Raises:
            DataError: A file that is no shard of this stage lies among its shards.
        """
        whole = self.is_current(upstream) and not self.examine()
        if whole:
            self._require_own_shards({path for path, _ in self._facts()})
        return whole

    def begin(self, upstream: dict[str, str], *, fresh: bool = False) -> list[Path]:
        """Hold the directory alone and drop what cannot be kept: all of it, what is damaged, what has another upstream.

        Shards name their upstream shard one by one and are kept where it is unchanged. Returns the damaged files.

        Raises:
            EnvironmentFault: Another process holds the directory.
        """
        self.lock.own()
        damaged = [] if fresh else self.examine()
        self.discard(damaged)
        sweep_temporary(self.path)
        made_from = read_json(self.path / "upstream.json")
        if fresh or made_from != upstream:
            self._drop(keep=() if fresh else SHARD_FOLDERS)
        (self.path / "DONE.json").unlink(missing_ok=True)
        write_json(self.path / "upstream.json", upstream)
        return damaged

    def release(self) -> None:
        if "lock" in self.__dict__:
            self.lock.release()

    @property
    def identity(self) -> Identity:
        return described.identity if (described := Description.read(self.path)) else {}

    @property
    def done(self) -> Done | None:
        """DONE.json's content, or None while the stage is unfinished."""
        return Done.read(self.path)

    @property
    def summary(self) -> Summary:
        """What the stage says of itself; empty while it is unfinished."""
        return done.summary if (done := self.done) else {}

    def files_below(self, folder: str) -> dict[str, FileFacts]:
        """The files that count in one folder, by their path in it, as they were when the stage was finished."""
        files = done.files if (done := self.done) else {}
        return {
            name.removeprefix(f"{folder}/"): facts for name, facts in files.items() if name.startswith(f"{folder}/")
        }

    def finish(self, summary: Summary, upstream: dict[str, str]) -> None:
        """Write DONE.json: the summary, what it was made from, and the facts of every file that counts.

        From then on others may hold the directory too. Shards are not read: their notes have their sha256.

        Raises:
            DataError: A file that is no whole shard of this stage lies among its shards.
        """
        receipts = [receipt for _, receipt in sorted(self.receipts().items())]
        self._require_own_shards({self.shard_path(receipt.index) for receipt in receipts})
        known = {self.shard_path(receipt.index): receipt.note.file for receipt in receipts if receipt.note}
        facts = {path: known.get(path) or FileFacts.of(path) for path in self._lasting_files()}
        files = {str(path.relative_to(self.path)): fact for path, fact in facts.items()}
        Done(self.stage, self.fingerprint, upstream, receipts, files, summary).write(self.path)
        if "lock" in self.__dict__:
            self.lock.share()  # other runs may read it while this one goes on

    def _require_own_shards(self, ours: Collection[Path]) -> None:
        if foreign := [path for path in self.shards() if path not in ours]:
            fix = "Delete this file and run the same command again: what is missing is made anew."
            raise DataError("This shard is of another run, or damaged.", str(foreign[0]), fix)

    @property
    def content(self) -> str:
        """A hash of what the stage made; what depends on it is stale when it changes. Logs (*.jsonl) do not count."""
        done = self.done
        files = done.files if done else {}
        made = [receipt.content_sha256 for receipt in done.shards] if done else []
        return fingerprint(
            {"made": made or {name: facts.sha256 for name, facts in files.items() if not name.endswith(".jsonl")}}
        )

    def is_current(self, upstream: dict[str, str]) -> bool:
        """Whether the stage is finished and was made from this upstream content."""
        done = self.done
        return done is not None and done.fingerprint == self.fingerprint and done.upstream == upstream

    def misfits(self) -> list[Path]:
        """The files that count and are missing or of another size; nothing is read."""
        return [path for path, facts in self._facts() if not facts.fit(path)]

    def examine(self) -> list[Path]:
        """The files that are missing or changed; only those with another modification time are read.

        The new time of an unchanged file is stored, so that it is not read again. The caller holds the lock.
        """
        written = dict(self._facts())
        found = {path: facts.renewed(path) for path, facts in written.items()}
        moved = {path: facts for path, facts in found.items() if facts and facts != written[path]}
        if moved and (done := self.done):
            now_known = {str(path.relative_to(self.path)): facts for path, facts in moved.items()}
            replace(done, files=done.files | now_known).write(self.path)
        else:
            for path, facts in moved.items():
                if note := read_note(path):
                    write_note(path, replace(note, file=facts))
        logs = {path for path in found if path.suffix == ".jsonl" and path.parent == self.path}
        return [path for path, facts in found.items() if facts is None and path not in logs]  # nothing is made of logs

    def discard(self, damaged: Sequence[Path]) -> None:
        """Hold the directory alone, forget that the stage is done, and drop what is damaged.

        A shard goes with its quarantine file and is made again alone. So is a folder of `parts`, with which files go
        that the record does not name: the next one would name them. Any other file takes all but the shards along.
        """
        self.lock.own()
        named = self.done.files if self.done else {}
        (self.path / "DONE.json").unlink(missing_ok=True)
        for path in damaged:
            if path.parent.name in ("shards", "quarantine"):
                self.drop_shard(self.path / "shards" / f"{path.stem}.parquet")
            elif path.parent.name in self.parts:
                remove(path.parent)
                for other in self._lasting_files():
                    if str(other.relative_to(self.path)) not in named:
                        other.unlink(missing_ok=True)
            else:
                self._drop(keep=SHARD_FOLDERS)

    def intact(self, name: str) -> bool:
        """Whether one file that counts is as it was written, such as a log, which no run makes again."""
        facts = self.done.files.get(name) if self.done else None
        return facts is not None and facts.renewed(self.path / name) is not None

    def verify(self) -> list[str]:
        """Read every file again and say what is missing, damaged or foreign, one line each.

        Raises:
            EnvironmentFault: This user may not read them.
        """
        written = dict(self._facts())
        with disk_errors(self.path):
            problems = {path: _problem(path, facts) for path, facts in written.items()}
            others = self.foreign_or_unreadable(written, finished=self.done is not None)
        problems |= {path: problems.get(path) or problem for path, problem in others.items()}
        record = self.path / "DONE.json"
        if self.done is None and os.path.lexists(record):
            problems[record] = f"{record} is damaged: no record of a finished stage can be read from it"
        return [problem for problem in problems.values() if problem]

    def _facts(self) -> list[tuple[Path, FileFacts]]:
        """The facts of all files that count: from DONE.json, or while unfinished from the notes beside the shards."""
        if done := self.done:
            return [(self.path / name, facts) for name, facts in done.files.items()]
        return [(path, note.file) for path in self.shards() if (note := read_note(path))]

    def _drop(self, keep: Sequence[str] = ()) -> None:
        """Remove what was made; what the directory is for stays."""
        for path in self.path.iterdir():
            if path.name not in ("stage.json", "lock", *keep):
                remove(path)

    def _lasting_files(self) -> list[Path]:
        """Every file but bookkeeping, scratch, what an orphan of a killed run is still writing, and names that are no
        text, which no record can hold: ours are."""
        found = (path for path in sorted(self.path.rglob("*")) if path.is_file() and path.suffix != ".tmp")
        named = ((path, path.relative_to(self.path)) for path in found)
        return [path for path, name in named if not self.uncounted & set(name.parts) and is_text(str(name))]


def _problem(path: Path, written: FileFacts) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    if path.is_symlink():
        return f"{path} is a link"
    found = FileFacts.of(path)
    if found.sha256 == written.sha256:
        return None
    return f"{path} is damaged: {found.size} bytes, {written.size} were written, or another sha256"
