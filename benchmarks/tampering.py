"""Claim: whatever is done to a finished run's files, a command ends with 0 and the truth, or says what is wrong.

Each case copies a finished run, tampers with one file or folder of it (`benchmarks.mutations`: bytes, JSON types,
names, times, links) and gives commands to what is left, chosen at random: two that only read (plan, status, verify,
inspect, compare with the untampered run, chat, check of the export, push --dry-run, keys); in two cases of ten `push`
to a Hub on loopback; in two of ten `archive`, and `restore` of what was archived; in six of ten `run`, and after one
that ended with 0 `verify`. Each eighth case tampers with an archive of the run instead: `restore`, then `archive`
again, which mends it or refuses, and `restore`. No command is left out. Findings are

- a traceback, an exit code that does not fit, more or less than one paragraph on stderr, control characters, a hang;
- 0 where what was said, or what the run holds afterwards, is not what the untampered run has;
- after `push` with 0 other files on the Hub than the untampered run's, byte for byte, its card included, or anything
  there after another code;
- `archive` with 0 of a run that `verify` calls damaged; `restore` with 0 of anything but what was archived;
- a file outside of the run that was written or deleted, or any file by a command that only reads;
- a whole shard that is gone after a `run` that refused.

    python -m benchmarks.tampering --cases 2000 --seed 0

Two tiny runs: Medusa heads, and recurrent heads with a tuned backbone. A record whose own sum was computed anew can say
what it likes (docs/threat-model.md): of these cases only the ending and the files outside are judged. Commands run in
processes forked from one that has imported the pipeline. Plots are drawn in each tenth case alone.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from benchmarks.claims import Claim, Result
from benchmarks.ground import RUNS, Ground, Reference
from benchmarks.mutations import MUTATIONS, Mutation
from benchmarks.run import keep
from benchmarks.trial import Case, Record, Trial
from tests.export.hub_stand_in import HubStandIn

ARCHIVED = 8  # one case in so many is with an archive


def measure(*, tiny: bool = False) -> Result:
    """2,000 cases with two runs; `tiny` takes a few with one."""
    return result_of(tamper(2 if tiny else 2_000, runs=("medusa",) if tiny else tuple(RUNS)))


def tamper(
    number: int,
    *,
    seed: int = 0,
    runs: Sequence[str] = tuple(RUNS),
    only: Sequence[int] = (),
    minutes: float = math.inf,
    part: tuple[int, int] = (0, 1),
    stop: Path | None = None,
) -> Record:
    """Tamper so many times, at most for so long, and record what is found.

    Args:
        only: Repeats these cases.
        part: (i, n) takes the i-th of each n cases.
        stop: No case begins once this file exists.
    """
    record, ends = Record(seed), time.monotonic() + 60 * minutes
    place = Path(tempfile.mkdtemp(prefix="tampering-")).resolve()
    try:
        with HubStandIn() as hub:
            ground = Ground(place, hub)
            references = {name: ground.reference(name) for name in runs}
            for case in cases(references, number, seed):
                mine = case.number in only if only else case.number % part[1] == part[0]
                if mine and time.monotonic() < ends and not (stop and stop.exists()):
                    ground.prepare(case.run, references[case.run].path)
                    Trial(case, ground, references[case.run], record).take()
                    if record.cases % 100 == 0:
                        print(f"{record.cases} of {number} cases, {len(record.findings)} findings", flush=True)
    except KeyboardInterrupt:  # what was found so far is the result
        print(f"interrupted after {record.cases} of {number} cases", flush=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return record


def tamper_side_by_side(number: int, workers: int, **how: Any) -> Record:
    """`tamper` in so many processes, each with runs of its own; interrupted, each ends with the case that it is at."""
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place, ProcessPoolExecutor(workers, processes, _end_well) as pool:
        stop = Path(place, "stop")
        parts = [pool.submit(tamper, number, part=(index, workers), stop=stop, **how) for index in range(workers)]
        try:
            wait(parts)
        except KeyboardInterrupt:
            stop.touch()
        records = [part.result() for part in parts]
    whole = Record(records[0].seed)
    for record in records:
        whole.cases, whole.commands = whole.cases + record.cases, whole.commands + record.commands
        whole.kinds.update(record.kinds)
        whole.endings.update(record.endings)
        whole.findings += record.findings
    return whole


def _end_well() -> None:
    """A TERM interrupts this process as ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def cases(references: dict[str, Reference], number: int, seed: int) -> Iterator[Case]:
    """Cases that take each path of each run with each way that fits it, in random order, and over again.

    Each eighth is with an archive of a run.
    """
    rng = random.Random(seed)
    runs = [found for run, reference in references.items() for found in _ways(run, reference.path)]
    archives = [found for run, reference in references.items() for found in _ways(run, reference.archive)]
    rng.shuffle(runs)
    rng.shuffle(archives)
    for index in range(number):
        archived = index % ARCHIVED == ARCHIVED - 1
        found = archives if archived else runs
        run, path, way = found[(index // ARCHIVED if archived else index) % len(found)]
        yield Case(index, run, path, way, archived)


def _ways(run: str, place: Path) -> Iterator[tuple[str, str, Mutation]]:
    for path in sorted(place.rglob("*")):
        yield from ((run, str(path.relative_to(place)), way) for way in MUTATIONS if way.fits(path))


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
    parser.add_argument("--workers", type=int, default=1, help="processes; a TERM ends them with their result")
    parser.add_argument("--only", type=int, nargs="+", help="repeat these cases alone; the result is not kept")
    parser.add_argument("--try", action="store_true", dest="trial", help="the result is not kept")
    asked, began = parser.parse_args(arguments), time.perf_counter()
    _end_well()
    how: dict[str, Any] = {"seed": asked.seed, "minutes": asked.minutes}
    if asked.workers > 1 and not asked.only:
        record = tamper_side_by_side(asked.cases, asked.workers, **how)
    else:
        record = tamper(asked.cases, only=asked.only or (), **how)
    if not record.cases:
        sys.exit("The end came before the first case: nothing was tampered with.")
    kept = not asked.trial and asked.only is None
    keep("tampering", result_of(record), time.perf_counter() - began, tiny=not kept)
    return min(1, len(record.findings))


if __name__ == "__main__":
    sys.exit(main())
