"""Benchmark of resuming: runs are killed at random moments and started again.

Claim: a run loses no row, writes no row twice, and ends with the bytes of an undisturbed run.

The sharded stages (seeds, generate, features) run over synthetic conversations, some malformed,
some repeated. The run is a process group that gets SIGKILL at random moments drawn from a seed, as
often as the time allows; with Ray a kill may also hit a single worker. Each time the same
configuration is run again. A finished round is verified and deleted, and the next one starts from
nothing; the last round runs to its end. Verification, for each stage: ids in = ids kept + ids
quarantined, each once; every shard and quarantine file has the bytes of an undisturbed inline run;
`verify` reports no problem; no temporary file is left.

    python -m benchmarks.soak --minutes 10 --conversations 20000 --seed 0 --executor inline

The target is tiny and random and answers with two tokens, since only rows, files and restarts
matter. Attempts are forked from a process that has already imported the pipeline, which saves
seconds per attempt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

import psutil
import yaml

from benchmarks import targets
from benchmarks.claims import Claim, Result
from benchmarks.run import keep
from examples.demo_target.target import train_tokenizer
from pipeline.cli.ending import ends_well
from pipeline.config.load import load_config
from pipeline.flow import run_flow
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.shards import parent_of, read_rows
from pipeline.storage.stage_directory import StageDirectory

STAGES = ("seeds", "generate", "features")
IMPORTS = ["pipeline.flow", "pipeline.cli.app", "transformers.models.llama.modeling_llama"]
WORDS = [
    "red",
    "blue",
    "cat",
    "moon",
    "river",
    "stone",
    "why",
    "how",
    "what",
    "sings",
    "runs",
    "old",
]
ROWS_PER_SHARD = 50
WORKERS = 2  # with Ray
SECONDS_TO_START_RAY = 10.0


@dataclass
class Record:
    """The counts and problems of the soak benchmark so far."""

    minutes: float = 0.0
    rounds: int = 0
    rows: int = 0  # input conversations over all rounds
    kills: int = 0
    workers_killed: int = 0  # with Ray, besides `kills`
    resumes: int = 0
    problems: list[str] = field(default_factory=list)


def measure(*, tiny: bool = False) -> Result:
    """Kill and resume runs with 20,000 conversations for ten minutes."""
    record = (
        soak(minutes=0.04, conversations=200) if tiny else soak(minutes=10, conversations=20_000)
    )
    return result_of(record)


def soak(*, minutes: float, conversations: int, seed: int = 0, executor: str = "inline") -> Record:
    """Kill and resume runs until the minutes are over; verify each run when it has ended.

    Raises:
        RuntimeError: A run ended with an error that no kill caused.
    """
    rng, record = random.Random(seed), Record()
    directory = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        _make_inputs(directory, conversations)
        reference = Attempts(directory, "reference", "inline")
        reference.finish()
        # Long enough to get beyond the first stage sometimes.
        longest = 1.5 * (
            _seconds_to_generate(reference.run) + (SECONDS_TO_START_RAY if executor == "ray" else 0)
        )
        ends = time.monotonic() + 60 * minutes
        while time.monotonic() < ends:
            disturbed = Attempts(directory, f"round-{record.rounds}", executor)
            disturbed.suffer(rng, longest, ends, record)
            disturbed.finish()
            found = differences(
                disturbed.run, reference.run, {f"made-up:{row}" for row in range(conversations)}
            )
            record.problems += found
            record.rounds += 1
            record.rows += conversations
            print(f"soak: {asdict(record)}", flush=True)
            if found:
                print(f"soak: {disturbed.run.path} is left to be looked at", flush=True)
            else:
                rmtree(disturbed.run.path)
        record.minutes = minutes + (time.monotonic() - ends) / 60
    finally:
        if not record.problems:
            rmtree(directory)
    return record


class Attempts:
    """A run of the soak benchmark, which is started again until it ends."""

    def __init__(self, directory: Path, name: str, executor: str):
        self.run, self.executor = RunDirectory(directory / name), executor
        self.config, self.log = directory / f"{name}.yaml", directory / f"{name}.log"
        settings = yaml.safe_load((directory / "settings.yaml").read_text())
        self.config.write_text(
            yaml.safe_dump(settings | {"run": {"name": name, "root": str(directory)}})
        )
        self.processes = multiprocessing.get_context("forkserver")
        self.processes.set_forkserver_preload(IMPORTS)

    def finish(self) -> None:
        """Run to the end without kills."""
        process = self._start()
        process.join()
        self._require_success(process)

    def suffer(self, rng: random.Random, longest: float, ends: float, record: Record) -> None:
        """Kill and resume the run until it or the time ends.

        Each wait before a kill is at most `longest` seconds. With Ray, single workers are killed
        too.
        """
        while time.monotonic() < ends:
            process = self._start()
            while True:
                process.join(longest * rng.random() ** 2)
                if process.exitcode is not None:
                    return self._require_success(process)
                workers = _workers(process.pid)
                if not workers or rng.random() < 0.5:
                    break
                rng.choice(workers).kill()
                record.workers_killed += 1
            _kill_group(process.pid)
            process.join()
            record.kills += 1
            record.resumes += 1

    def _start(self) -> Any:
        arguments = (str(self.config), self.executor, str(self.log))
        process = self.processes.Process(target=_drive, args=arguments, daemon=True)
        process.start()
        return process

    def _require_success(self, process: Any) -> None:
        if process.exitcode:
            raise RuntimeError(
                f"the run ended with {process.exitcode}: {self.log.read_text()[-2000:]}"
            )


def _drive(config: str, executor: str, log: str) -> None:
    """Run the flow up to the features stage, in a process group of its own.

    Output goes to the file `log`, and the process exits as `medusa-distill run` does.
    """
    os.setsid()
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.exit(
        ends_well(
            lambda: run_flow(load_config(Path(config)), until=STAGES[-1], executor=executor) and 0
        )
    )


def _seconds_to_generate(run: RunDirectory) -> float:
    """Return the seconds from the start of a run to its first generated shard.

    By then the seeds stage, which always starts over, is done, and the workers have started.
    """
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    first = next(
        event for event in events if event["event"] == "shard" and event["stage"] == STAGES[1]
    )
    return first["time"] - events[0]["time"]


def _workers(driver: int) -> list[psutil.Process]:
    """Return the processes of this driver's Ray actors that run a stage's worker."""
    family = psutil.Process(driver).children(recursive=True)
    found = [
        process
        for process in family
        if "ShardActor" in " ".join(process.as_dict(["cmdline"])["cmdline"] or ())
    ]
    return sorted(found, key=lambda process: process.pid)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # the process does not lead a group yet
        os.kill(leader, signal.SIGKILL)


def differences(run: RunDirectory, reference: RunDirectory, ids_in: set[str]) -> list[str]:
    """List a finished run's problems, one line each; `ids_in` are the ids of the sources' rows."""
    found = [f"{path} was left behind" for path in run.path.rglob("*.tmp")]
    for name in STAGES:
        stage, other = _latest(run, name), _latest(reference, name)
        kept = [row["id"] for path in stage.parquet_files() for row in read_rows(path, ["id"])]
        lines = [
            line
            for path in _quarantine(stage)
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        refused = [json.loads(line)["id"] for line in lines]
        owners = {row if row in ids_in else parent_of(row) for row in kept}
        if lost := ids_in - owners - set(refused):
            found.append(f"{name} lost {len(lost)} rows, {min(lost)} among them")
        if made_up := (owners | set(refused)) - ids_in:
            found.append(f"{name} made up {len(made_up)} rows, {min(made_up)} among them")
        if len(set(kept)) < len(kept) or len(set(refused)) < len(refused) or owners & set(refused):
            found.append(f"{name} has rows twice")
        found += [f"{name}: {problem}" for problem in stage.verify()]
        found += [
            f"{name}: {path} differs from the undisturbed run's"
            for path in _different(stage, other)
        ]
        ids_in = set(kept)
    return found


def _different(stage: StageDirectory, other: StageDirectory) -> list[str]:
    """List shards and quarantine files that only one of two stages has, or whose bytes differ."""
    ours, theirs = (
        {file.name: file for file in (*one.parquet_files(), *_quarantine(one))}
        for one in (stage, other)
    )
    same = {
        name
        for name in ours.keys() & theirs.keys()
        if ours[name].read_bytes() == theirs[name].read_bytes()
    }
    return sorted((ours.keys() | theirs.keys()) - same)


def _quarantine(stage: StageDirectory) -> list[Path]:
    return sorted((stage.path / "quarantine").glob("*.jsonl"))


def _latest(run: RunDirectory, name: str) -> StageDirectory:
    stage = run.latest(name)
    assert stage is not None, f"{run.path} never reached {name}"
    return stage


def _make_inputs(directory: Path, conversations: int) -> None:
    """Write the inputs of the soak benchmark: target, conversations, and settings of a run."""
    tokenizer = train_tokenizer(targets.bundled_conversations())
    tokenizer.save_pretrained(directory / "target")
    targets.random_target(
        directory / "target", targets.TINY | {"vocab_size": len(tokenizer), "hidden_size": 32}
    )
    lines = [json.dumps(_conversation(row)) for row in range(conversations)]
    lines = [
        lines[row - 1] if row % 100 == 99 else line for row, line in enumerate(lines)
    ]  # each hundredth twice
    (directory / "made-up.jsonl").write_text("\n".join(lines) + "\n")
    settings = {
        "target": {"model": str(directory / "target")},
        "seeds": {
            "sources": [{"path": str(directory / "made-up.jsonl")}],
            "rows_per_shard": ROWS_PER_SHARD,
        },
        "generate": {
            "mode": "replay",
            "engine": "transformers",
            "samples": 1,
            "max_new_tokens": 2,
            "rounds": 2,
        },
        "placement": {stage: {"workers": WORKERS} for stage in STAGES[1:]},
        "limits": {"min_free_disk_gb": 0},
    }
    (directory / "settings.yaml").write_text(yaml.safe_dump(settings))


def _conversation(row: int) -> dict[str, Any]:
    """Return a row of one or two short exchanges, with a unique first question.

    Each fiftieth row is malformed.
    """
    rng = random.Random(row)
    if row % 50 == 7:
        return {"conversations": [{"from": "human", "value": row}]}
    turns = [
        " ".join(rng.choices(WORDS, k=rng.randint(2, 8))) for _ in range(2 * rng.randint(1, 2))
    ]
    turns[0] += f" {row}?"
    roles = ("human", "gpt") * 2
    return {
        "conversations": [
            {"from": role, "value": turn} for role, turn in zip(roles, turns, strict=False)
        ]
    }


def result_of(record: Record) -> Result:
    """Return the result of the soak benchmark: the share of rounds without a problem."""
    good = record.rounds - len({problem.split(":")[0] for problem in record.problems})
    sides = {
        "kills": record.kills,
        "Ray workers killed": record.workers_killed,
        "conversations": record.rows,
    }
    name = (
        "killed and resumed runs that ended with every row once and with the undisturbed run's"
        " bytes"
    )
    claim = Claim(name, 100.0 * good / record.rounds, unit="%", aim=100, sides=sides)
    return Result([claim], asdict(record))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak benchmark and write the result; return 1 if a run had a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description="Kill runs, resume them, compare."
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--conversations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which it strikes")
    parser.add_argument("--executor", choices=("inline", "ray"), default="inline")
    started, asked = time.perf_counter(), parser.parse_args(arguments)
    record = soak(**vars(asked))
    print("\n".join(record.problems))
    result = result_of(record)
    keep(
        "soak",
        Result(result.claims, {**result.facts, "asked": vars(asked)}),
        time.perf_counter() - started,
    )
    return min(1, len(record.problems))


if __name__ == "__main__":
    sys.exit(main())
