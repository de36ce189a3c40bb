"""One case of `benchmarks.tampering`: tamper, give commands, and hold each end against the untampered run."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.endings import (
    Ended,
    Tree,
    by_its_name,
    changes,
    digest,
    ending_problems,
    output_problems,
    result_problems,
    tree_of,
    whole_shards,
)
from benchmarks.ground import MOST_ASKED, READERS, Ground, Reference
from benchmarks.mutations import Mutation
from benchmarks.outlets import (
    checked_problems,
    compared_problems,
    copied_problems,
    figures_of_check,
    half_restored_problems,
    published_problems,
)

RECORDS = ("DONE.json", "stage.json", "latest")
OF_A_PUSH = ("push", "push-", "lock", "events.jsonl", "digests.json", "stage.json")  # what it may write in a run


@dataclass(frozen=True)
class Case:
    """One act of tampering: with which run or its archive, at which path in it, how."""

    number: int
    run: str
    path: str
    mutation: Mutation
    archived: bool = False


@dataclass
class Record:
    """What was done and found so far."""

    seed: int
    cases: int = 0
    commands: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)


class Trial:
    """A case on prepared ground."""

    def __init__(self, case: Case, ground: Ground, reference: Reference, record: Record):
        self.case, self.ground, self.reference, self.record = case, ground, reference, record
        self.rng = random.Random(f"{record.seed}:{case.number}")
        self.detail = ""

    def take(self) -> None:
        """Tamper, give the commands, and record what is wrong with their ends."""
        self.record.cases += 1
        self.record.kinds[
            f"an archive's {self.case.mutation.kind}" if self.case.archived else self.case.mutation.kind
        ] += 1
        if self.case.archived:
            shutil.copytree(self.reference.archive, self.ground.archive)
            self._tamper(self.ground.archive)
            self._restore_what_was_archived()
            return
        self._tamper(self.ground.run)
        for name in (self.rng.choice(MOST_ASKED), self.rng.choice(READERS)):
            self._read(name)
        if self.rng.random() < 0.2:
            self._publish()
        if self.rng.random() < 0.2:
            self._archive()
        if self.rng.random() < 0.6:
            self._run()

    def _tamper(self, place: Path) -> None:
        self.detail = self.case.mutation.tamper(place / self.case.path, self.ground.outside, self.rng)
        self.is_config, self.believed = self.case.path == "run.yaml", self.case.mutation.name == "retype_signed"
        counted = self.reference.counted.items()
        damaged = any(digest(self.ground.run / file) != sha256 for file, sha256 in counted)
        self.damaged = damaged and not any(name in self.case.path for name in RECORDS) and not self.is_config

    def _give(self, name: str) -> tuple[Ended, list[str], Tree, Tree]:
        """A command's end, what is wrong with it as such, and the run before and after it."""
        outside, inside = self.ground.untouchable(), tree_of(self.ground.run)
        ended = self.ground.command(name, drawn=self.rng.random() < 0.1)
        self.record.commands += 1
        self.record.endings[f"{name.partition(' ')[0]} {ended.code}"] += 1
        problems = ending_problems(ended, is_config=self.is_config)
        problems += changes(outside, self.ground.untouchable(), "outside of the run")
        return ended, problems, inside, tree_of(self.ground.run)

    def _read(self, name: str) -> Ended:
        """Give a command that only reads."""
        ended, problems, before, after = self._give(name)
        problems += changes(before, after, "by a command that only reads")
        truth = self.reference.said[name]
        if not self.believed and not self.is_config:
            told = ended
            if self.case.mutation.name == "link":
                told = by_its_name(ended, self.detail, Path(self.case.path).name)
            problems += output_problems(name, told, truth, self.case.mutation.kind, damaged=self.damaged)
            if name == "compare":
                problems += compared_problems(ended, truth)
        if name == "check":
            of_export = any("export-" in part for part in Path(self.case.path).parts)
            whole = not of_export and not self.case.path.startswith("latest")
            found = figures_of_check(self.ground.case / "tmp" / "checked")
            problems += checked_problems(ended, found, self.reference.checked, damaged=not whole)
        self._note(ended, problems)
        return ended

    def _publish(self) -> None:
        """Push to the Hub that everybody sees."""
        ended, problems, before, after = self._give("publish")
        kept = self._but(before, OF_A_PUSH), self._but(after, OF_A_PUSH)
        problems += changes(*kept, "in the run, by a push")
        if not self.believed:
            card = {"README.md"} if self.is_config else set()  # it shows the configuration
            problems += published_problems(ended, self.ground.published(), self.reference.published, but=card)
        self._note(ended, problems)

    def _archive(self) -> None:
        """Archive the run, and restore what was archived."""
        ended, problems, before, after = self._give("archive")
        kept = self._but(before, ("lock", "events.jsonl")), self._but(after, ("lock", "events.jsonl"))
        problems += changes(*kept, "in the run, by an archive")
        self._note(ended, problems)
        if ended.code or self.believed or self.is_config:
            return
        linked = self.case.mutation.kind == "links"
        self._restore(some=linked or self.case.path.startswith("latest"), linked=linked)
        whole = {
            name for name, sha256 in self.reference.counted.items() if digest(self.ground.restored / name) == sha256
        }
        if whole != self.reference.counted.keys() and self._read("verify").code:  # an archive of what is lost is none
            self._note(ended, ["archives a run that verify calls damaged"])

    def _restore(self, *, some: bool = False, linked: bool = False) -> Ended:
        """Restore, and hold what came back against the run."""
        ended, problems, before, after = self._give("restore")
        problems += changes(before, after, "in the run, by a restore")
        if ended.code:
            problems += half_restored_problems(self.ground.run, self.ground.restored)
        else:
            verified, more, *_ = self._give("verify-restored")
            problems += more + (["restores what verify calls damaged"] if verified.code else [])
            if not linked:
                problems += copied_problems(self.ground.run, self.ground.restored, self.reference.counted, some=some)
        self._note(ended, problems)
        return ended

    def _restore_what_was_archived(self) -> None:
        """Restore from an archive that was tampered with; then archive the run again, which mends it or refuses."""
        before = tree_of(self.ground.archive)
        ended = self._restore()
        self._note(ended, changes(before, tree_of(self.ground.archive), "in the archive, by a restore"))
        shutil.rmtree(self.ground.restored, ignore_errors=True)
        for mark in re.findall(r"Delete (verified/\w{64}) there", " ".join(ended.stderr.split())):
            (self.ground.archive / mark).unlink(missing_ok=True)
        again, problems, *_ = self._give("archive")
        self._note(again, problems)
        if again.code == 0 and self._restore().code:
            self._note(again, ["ends with 0, and nothing can be restored"])

    def _run(self) -> None:
        """Run the configuration again, and verify what came of it."""
        name = "run-own" if self.rng.random() < 0.3 else "run"
        whole = whole_shards(self.ground.run, self.reference.path)
        ended, problems, *_ = self._give(name)
        is_log = self.case.path.endswith(".jsonl") and self.case.path.count("/") == 1  # of training: never made again
        unread = self.case.mutation.name == "flip_unnoticed" or is_log
        if not self.believed and not (self.is_config and name == "run-own"):
            run, truth = self.ground.run, self.reference.path
            problems += result_problems(ended, run, truth, self.case.path, whole=whole, unread=unread)
        self._note(ended, problems)
        if ended.code == 0:
            self.record.commands += 1
            if (verified := self.ground.command("verify")).code and not (self.believed or unread):
                self._note(verified, ["verify finds damage after a run that ended with 0"])

    def _but(self, tree: Tree, names: Sequence[str]) -> Tree:
        """Without what a command may write in a run, and without what it may sweep."""
        root = self.ground.run

        def may(path: str) -> bool:
            parts = Path(path).relative_to(root).parts
            return any(part in names or part.startswith("push-") for part in parts) or path.endswith(".tmp")

        return {path: facts for path, facts in tree.items() if not may(path)}

    def _note(self, ended: Ended, problems: Sequence[str]) -> None:
        case = self.case
        for problem in problems:
            said = " ".join((ended.stderr.strip() or ended.stdout[-300:]).split())
            where: dict[str, Any] = {"case": case.number, "run": f"{case.run}{' archived' * case.archived}"}
            where |= {"path": case.path, "mutation": f"{case.mutation.name} {self.detail}"}
            self.record.findings.append(where | {"command": ended.line[:1], "what": problem, "said": said[:600]})
            print(json.dumps(self.record.findings[-1]), flush=True)
