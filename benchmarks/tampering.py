"""Claim: whatever is done to a finished run's files, a command ends with 0 and the truth, or says what is wrong.

Each case copies a finished run, tampers with one file or folder of it (`benchmarks.mutations`: bytes, JSON types,
names, times, links) and gives commands to what is left: two that only read, chosen at random (plan, status, verify,
inspect, chat, push --dry-run), then `run`, and after a `run` that ended with 0 `verify`. Findings are

- a traceback, an exit code that does not fit, more or less than one paragraph on stderr, control characters, a hang;
- 0 where what was said, or what the run holds afterwards, is not what the untampered run has;
- a file outside of the run that was written or deleted, or any file by a command that only reads;
- a whole shard that is gone after a `run` that refused.

    python -m benchmarks.tampering --cases 2000 --seed 0

Two tiny runs: Medusa heads, and recurrent heads with a tuned backbone. A record whose own sum was computed anew can say
what it likes (docs/threat-model.md): of these cases only the ending and the files outside are judged. Commands run in
processes forked from one that has imported the pipeline. Plots are drawn in each tenth case alone.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Result
from benchmarks.ground import READERS, RUNS, Ground, Reference
from benchmarks.mutations import MUTATIONS, Mutation
from benchmarks.run import keep
from benchmarks.verdicts import (
    Ended,
    by_its_name,
    changes,
    digest,
    judge_ending,
    judge_result,
    judge_said,
    tree_of,
    whole_shards,
)


@dataclass(frozen=True)
class Case:
    """One act of tampering: with which run, at which path in it, how."""

    number: int
    run: str
    path: str
    mutation: Mutation


@dataclass
class Record:
    """What was done and found so far."""

    seed: int
    cases: int = 0
    commands: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    findings: list[dict[str, Any]] = field(default_factory=list)


def measure(*, tiny: bool = False) -> Result:
    """2,000 cases with two runs; `tiny` takes a few with one."""
    return result_of(tamper(4 if tiny else 2_000, runs=("medusa",) if tiny else tuple(RUNS)))


def tamper(
    number: int,
    *,
    seed: int = 0,
    runs: Sequence[str] = tuple(RUNS),
    only: Sequence[int] = (),
    minutes: float = math.inf,
) -> Record:
    """Tamper so many times, at most for so long, and record what is found; `only` repeats these cases."""
    record, ends = Record(seed), time.monotonic() + 60 * minutes
    place = Path(tempfile.mkdtemp(prefix="tampering-")).resolve()
    try:
        ground = Ground(place)
        references = {name: ground.reference(name) for name in runs}
        for case in cases(references, number, seed):
            if (not only or case.number in only) and time.monotonic() < ends:
                ground.prepare(case.run, references[case.run].path)
                _judge(case, ground, references[case.run], record, random.Random(f"{seed}:{case.number}"))
                if record.cases % 100 == 0:
                    print(f"{record.cases} of {number} cases, {len(record.findings)} findings", flush=True)
    except KeyboardInterrupt:  # what was found so far is the result
        print(f"interrupted after {record.cases} of {number} cases", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return record


def cases(references: dict[str, Reference], number: int, seed: int) -> Iterator[Case]:
    """Cases that take each path of each run with each way that fits it, in random order, and over again."""
    rng, found = random.Random(seed), []
    for run, reference in references.items():
        for path in sorted(reference.path.rglob("*")):
            ways = [way for way in MUTATIONS if way.fits(path)]
            found += [(run, str(path.relative_to(reference.path)), way) for way in ways]
    rng.shuffle(found)
    for index in range(number):
        yield Case(index, *found[index % len(found)])


def _judge(case: Case, ground: Ground, reference: Reference, record: Record, rng: random.Random) -> None:
    """Tamper, give the commands, and record what is wrong with their ends."""
    detail = case.mutation.tamper(ground.run / case.path, ground.outside, rng)
    record.cases += 1
    record.kinds[case.mutation.kind] += 1
    is_config, believed = case.path == "run.yaml", case.mutation.name == "retype_signed"
    is_log = case.path.endswith(".jsonl") and case.path.count("/") == 1  # of training, which no run makes again
    unread = case.mutation.name == "flip_unnoticed" or is_log
    records = ("DONE.json", "stage.json", "latest")
    damaged = any(digest(ground.run / file) != sha256 for file, sha256 in reference.counted.items())
    damaged = damaged and not any(name in case.path for name in records) and not is_config

    def give(name: str) -> Ended:
        outside, inside = ground.untouchable(), tree_of(ground.run)
        whole = [] if name in READERS else whole_shards(ground.run, reference.path)
        ended = ground.command(name, drawn=rng.random() < 0.1)
        record.commands += 1
        record.endings[f"{ended.line[0]} {ended.code}"] += 1
        problems = judge_ending(ended, is_config=is_config)
        problems += changes(outside, ground.untouchable(), "outside of the run")
        if name in READERS:
            problems += changes(inside, tree_of(ground.run), "by a command that only reads")
        if name in READERS and not believed and not is_config:
            told = by_its_name(ended, detail, Path(case.path).name) if case.mutation.name == "link" else ended
            problems += judge_said(name, told, reference.said[name], case.mutation.kind, damaged=damaged)
        if name not in READERS and not believed and not (is_config and name == "run-own"):
            problems += judge_result(ended, ground.run, reference.path, case.path, whole=whole, unread=unread)
        _note(record, case, detail, ended, problems)
        return ended

    for name in (rng.choice(READERS[:5]), rng.choice(READERS)):
        give(name)
    if give("run-own" if rng.random() < 0.3 else "run").code == 0:
        record.commands += 1
        if (ended := ground.command("verify")).code and not (believed or unread):
            _note(record, case, detail, ended, ["verify finds damage after a run that ended with 0"])


def _note(record: Record, case: Case, detail: str, ended: Ended, problems: Sequence[str]) -> None:
    for problem in problems:
        said = " ".join((ended.stderr.strip() or ended.stdout[-300:]).split())
        where = {"case": case.number, "run": case.run, "path": case.path, "mutation": f"{case.mutation.name} {detail}"}
        record.findings.append(where | {"command": ended.line[:1], "what": problem, "said": said[:600]})
        print(json.dumps(record.findings[-1]), flush=True)


def result_of(record: Record) -> Result:
    """The claim and its facts."""
    good = record.cases - len({finding["case"] for finding in record.findings})
    sides = {"cases": record.cases, "commands": record.commands}
    sides |= {f"{kind} tampered with": number for kind, number in sorted(record.kinds.items())}
    name = "acts of tampering with a finished run after which every command told the truth or refused in one paragraph"
    claim = Claim(name, 100.0 * good / record.cases, unit="%", aim=100, sides=sides)
    facts = {"seed": record.seed, "endings": dict(sorted(record.endings.items())), "findings": record.findings}
    return Result([claim], facts)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tamper and write the result; returns 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tampering", description="Tamper with finished runs.")
    parser.add_argument("--cases", type=int, default=2_000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no case begins later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="repeat these cases alone; the result is not kept")
    parser.add_argument("--try", action="store_true", dest="trial", help="the result is not kept")
    asked, began = parser.parse_args(arguments), time.perf_counter()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    record = tamper(asked.cases, seed=asked.seed, only=asked.only or (), minutes=asked.minutes)
    kept = not asked.trial and asked.only is None
    keep("tampering", result_of(record), time.perf_counter() - began, tiny=not kept)
    return min(1, len(record.findings))


if __name__ == "__main__":
    sys.exit(main())
