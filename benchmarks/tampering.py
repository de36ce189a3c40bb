"""Benchmark of damaged and copied runs: `verify` names damage, `run` repairs it.

Claim: every damage is named and repaired, and a command on a copied run changes only the copy.

Each case copies or moves a tiny finished run, with or without a store of its own, and runs commands
on the copy's own run.yaml. In four of five cases a file that a stage's DONE.json names, or
DONE.json itself, is damaged first as by a bad disk: a bit flips (also with the modification time
kept), or the file is truncated, emptied or removed. Then

- `verify` ends with 1 and names the file, or with 0 if DONE.json was removed, since the stage is
  then unfinished; `status` and `plan` end with 0; none of them writes anything;
- `run` ends with 0 and has the bytes of the undamaged run, and `verify` ends with 0 after it. A
  file that `run` does not read (a bit flipped with the time kept) or never writes again (a
  training's logs) stays damaged and named.

In the other cases `run --fresh STAGE` runs a stage of the copy again. In some of these cases the
stage's directory is a link to the original's, which `run` refuses. In no case may a file outside of
the copy be created, changed or deleted.

    python -m benchmarks.tampering --cases 100 --seed 0

A flipped bit in DONE.json is not tried: it is noticed only if the file is no longer JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.claims import Claim, Result
from benchmarks.run import keep
from pipeline.storage.fingerprint import sha256_of
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import STAGES, save_seeds, save_target, tiny_settings
from tests.forks import in_a_fork

COPIES = ("copied", "moved", "copied with its store", "moved with its store")
LINKED = "a stage linked to the original's"
Tree = dict[str, tuple[Any, ...]]  # by path: mode, size, time, and a link's target


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flip_unnoticed(path: Path, rng: random.Random) -> None:
    before = path.stat()
    flip(path, rng)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def empty(path: Path, rng: random.Random) -> None:
    os.truncate(path, 0)


def remove(path: Path, rng: random.Random) -> None:
    path.unlink()


DAMAGE: dict[str, Callable[[Path, random.Random], None]] = {
    way.__name__: way for way in (flip, flip_unnoticed, truncate, empty, remove)
}


@dataclass(frozen=True)
class Case:
    """A copied run in which one file is damaged, or one stage runs again."""

    number: int
    copy: str
    stage: str
    file: str = ""  # in the stage's directory
    damage: str = ""


@dataclass
class Record:
    """The commands and findings of all cases so far."""

    seed: int
    commands: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)


def measure(*, tiny: bool = False) -> Result:
    """Damage and copy finished runs in 100 cases; in two if `tiny`."""
    return result_of(tamper(2 if tiny else 100))


def tamper(number: int, *, seed: int = 0, only: Sequence[int] = ()) -> Record:
    """Run the first `number` cases, or those in `only`, and record the findings."""
    record = Record(seed)
    with tempfile.TemporaryDirectory(prefix="tampering-") as name:
        place = Path(name).resolve()
        target, seeds = save_target(place / "target"), save_seeds(place / "seeds.jsonl")
        for origin, store in (("plain", None), ("stored", str(place / "stored" / "store"))):
            settings = tiny_settings(target, seeds, place / origin, run__store=store)
            (place / f"{origin}.yaml").write_text(yaml.safe_dump(settings))
            code, said = command("run", place / f"{origin}.yaml")
            assert code == 0, said
        wanted = results_of(RunDirectory.open(place / "plain" / "run")[0])
        for case in cases(place / "plain" / "run", number, seed):
            if not only or case.number in only:
                Trial(case, place, wanted, record).take()
    return record


def cases(run: Path, number: int, seed: int) -> Iterator[Case]:
    """Yield cases: every fifth runs a stage again, the others damage each file in each way.

    Damages are in random order, and repeat if there are more cases.
    """
    rng = random.Random(seed)
    damaged = []
    for name, stage in RunDirectory.open(run)[0].stages().items():
        files = stage.done.files if stage.done else {}
        sizes = {file: facts.size for file, facts in files.items()}
        damaged += [
            (name, file, way)
            for file, size in sizes.items()
            for way in DAMAGE
            if size or way == "remove"
        ]
        damaged += [(name, "DONE.json", way) for way in ("truncate", "empty", "remove")]
    rng.shuffle(damaged)
    for index in range(number):
        copy = rng.choice(COPIES)
        if index % 5 == 4:
            yield Case(index, rng.choice((copy, LINKED)), rng.choice(STAGES))
        else:
            yield Case(index, copy, *damaged[(index - index // 5) % len(damaged)])


class Trial:
    """A case on a copy of the original runs in `place`; `wanted` are the original's results."""

    def __init__(self, case: Case, place: Path, wanted: dict[str, str], record: Record):
        self.case, self.place, self.wanted, self.record = case, place, wanted, record
        self.copy = place / "copy"
        self.run = self.copy / "run"

    def take(self) -> None:
        """Copy the run, damage the copy, run the commands, and record the findings."""
        self.record.kinds[self.case.damage or "stage made again"] += 1
        original = self.place / ("stored" if "store" in self.case.copy else "plain")
        away = self.place / "away"
        shutil.copytree(original, self.copy, symlinks=True)
        if "moved" in self.case.copy:
            original.rename(away)
        try:
            if self.case.damage:
                self._mend()
            else:
                self._make_again(original)
        finally:
            shutil.rmtree(self.copy)
            if away.exists():
                away.rename(original)

    def _mend(self) -> None:
        case = self.case
        path = self._stage().path / case.file
        DAMAGE[case.damage](path, random.Random(f"{self.record.seed}:{case.number}"))
        is_log = path.suffix == ".jsonl" and "/" not in case.file
        stays = case.damage == "flip_unnoticed" or is_log
        is_unfinished = case.file == "DONE.json" and case.damage == "remove"
        self._give("verify", 0 if is_unfinished else 1, "" if is_unfinished else str(path))
        self._give("status", 0)
        self._give("plan", 0)
        self._give("run", 0)
        self._compare(but=f"{case.stage}/{case.file}" if stays else "")
        self._give("verify", 1 if stays else 0)

    def _make_again(self, original: Path) -> None:
        case, made = self.case, self._stage().path
        if case.copy == LINKED:
            shutil.rmtree(made)
            made.symlink_to(original / made.relative_to(self.copy), target_is_directory=True)
            self._give("run", 3, str(made), "--fresh", case.stage)
            return
        self._give("verify", 0)
        self._give("status", 0)
        self._give("plan", 0)
        self._give("run", 0, "", "--fresh", case.stage)
        self._compare()
        self._give("verify", 0)

    def _stage(self) -> StageDirectory:
        stage = RunDirectory.open(self.run)[0].latest(self.case.stage)
        assert stage is not None, f"the copy has no {self.case.stage}"
        return stage

    def _give(self, name: str, code: int, says: str = "", *words: str) -> None:
        """Run a command on the copied run; record any unexpected exit code, output or change."""
        reads = name != "run"
        before = tree_of(self.place, but=None if reads else self.copy)
        given = self.run if name in ("verify", "status") else self.run / "run.yaml"
        ended, said = command(name, given, *words)
        after = tree_of(self.place, but=None if reads else self.copy)
        self.record.commands += 1
        self.record.endings[f"{name} {ended}"] += 1
        if ended != code:
            self._note(name, f"ends with {ended}, not with {code}", said)
        if says not in said:
            self._note(name, f"does not name {says}", said)
        changed = sorted({path for path, _ in before.items() ^ after.items()})
        if changed:
            self._note(name, f"has changed {', '.join(changed[:3])}", said)

    def _compare(self, but: str = "") -> None:
        """Record a finding if results of the copy's stages differ from the original's."""
        found = results_of(RunDirectory.open(self.run)[0])
        names = sorted(
            name for name in self.wanted if found.get(name) != self.wanted[name] and name != but
        )
        if names:
            self._note("run", f"has made other bytes of {', '.join(names[:3])}", "")

    def _note(self, name: str, problem: str, said: str) -> None:
        where = {
            **vars(self.case),
            "command": name,
            "what": problem,
            "said": " ".join(said.split())[-600:],
        }
        self.record.findings.append(where)
        print(where, flush=True)


def tree_of(place: Path, but: Path | None) -> Tree:
    """Return mode, size and time of all files below `place`, except in `but`.

    Links are not followed, and folders have no time.
    """
    found: Tree = {}
    for path in place.rglob("*"):
        if but is None or not path.is_relative_to(but):
            facts = path.lstat()
            goal = os.readlink(path) if path.is_symlink() else ""
            of_file = () if path.is_dir() else (facts.st_size, facts.st_mtime_ns, goal)
            found[str(path)] = (facts.st_mode, *of_file)
    return found


def results_of(run: RunDirectory) -> dict[str, str]:
    """Return the sha256 of a run's reproducible files, by stage and file.

    Logs and answers contain times and are left out.
    """
    found = {}
    for name, stage in run.stages().items():
        for file in stage.done.files if stage.done else ():
            is_timed = file.endswith(".jsonl") and not file.startswith("quarantine/")
            if not is_timed and (stage.path / file).is_file():
                found[f"{name}/{file}"] = sha256_of(stage.path / file)
    return found


def command(name: str, given: Path, *words: str) -> tuple[int | None, str]:
    """Run a medusa-distill command in its own process; return its exit code and output."""
    executor = ("--executor", "inline") if name == "run" else ()
    return in_a_fork(_obey, [name, str(given), *words, *executor])


def _obey(words: list[str]) -> None:
    from pipeline.cli.app import app
    from pipeline.cli.ending import ends_well
    from pipeline.report import plots

    plots.draw_plots = lambda *_: {}  # type: ignore[assignment]  # plots take a third of a tiny run's time
    code = ends_well(lambda: app(words, standalone_mode=False))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def result_of(record: Record) -> Result:
    """Return the result of the tampering benchmark: the share of cases without a finding."""
    number = record.kinds.total()
    good = number - len({finding["number"] for finding in record.findings})
    what = (
        "damaged or copied runs of which every damage was named and mended, and nothing outside was"
        " changed"
    )
    sides = {"cases": number, "commands": record.commands, **dict(sorted(record.kinds.items()))}
    claim = Claim(what, 100.0 * good / number, unit="%", aim=100, sides=sides)
    facts = {
        "seed": record.seed,
        "endings": dict(sorted(record.endings.items())),
        "findings": record.findings,
    }
    return Result([claim], facts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases and write the result; return 1 if there is a finding."""
    parser = argparse.ArgumentParser("python -m benchmarks.tampering", description=measure.__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", type=int, nargs="+", default=(), help="cases to repeat; nothing is kept"
    )
    asked, began = parser.parse_args(arguments), time.perf_counter()
    record = tamper(asked.cases, seed=asked.seed, only=asked.only)
    keep("tampering", result_of(record), time.perf_counter() - began, tiny=bool(asked.only))
    return min(1, len(record.findings))


if __name__ == "__main__":
    sys.exit(main())
