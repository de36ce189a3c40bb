"""What is wrong with how a command ended that was given to a run somebody had tampered with: `benchmarks.tampering`."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

SEVERAL = 3  # files that a finding names
VOLATILE = {"DONE.json", "lock", "receipts", "README.md", "tensorboard", "answers", "tracking.json"}  # times, ids
BOOKKEEPING = {"stage.json", "upstream.json"}  # of which nothing is made
FIGURES: dict[str, tuple[str, ...]] = {  # of report.json: those that no clock has a part in
    "seeds": ("rows", "quarantined"),
    "generate": ("rows", "quarantined", "tokens"),
    "features": ("rows", "positions", "tokens", "bytes_per_position"),
    "train": ("steps", "tokens", "final_loss", "best_step", "hyperparameters"),
    "tree": ("nodes", "expected_acceleration_rate", "expected_standard_error", "chain"),
    "run": ("fingerprints",),
}
NATIVE = ("acceleration_rate", "standard_error", "greedy_match", "accepted_lengths", "prompts", "chain")
WHOLE = ("target", "method", "num_heads", "heads", "quarantine")
Tree = dict[str, tuple[Any, ...]]  # by path: what lstat says of it, and a link's goal


@dataclass(frozen=True)
class Ended:
    """A command's end; `code` is None where it did not end."""

    line: list[str]
    code: int | None
    stdout: str
    stderr: str
    seconds: float = 0.0


def tree_of(place: Path, but: tuple[Path, ...] = ()) -> Tree:
    """Everything below a place, without following links; times of folders are left out, and so is `but`."""
    found: Tree = {}
    for entry in os.scandir(place):
        if Path(entry.path) in but:
            continue
        facts = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(facts.st_mode):
            found[entry.path] = (facts.st_mode,)
            found |= tree_of(Path(entry.path), but)
        else:
            goal = os.readlink(entry.path) if entry.is_symlink() else ""
            found[entry.path] = (facts.st_mode, facts.st_size, facts.st_mtime_ns, facts.st_ino, goal)
    return found


def changes(before: Tree, after: Tree, where: str) -> list[str]:
    """What was made, changed or deleted between two looks."""
    made, gone = after.keys() - before.keys(), before.keys() - after.keys()
    changed = {path for path in before.keys() & after.keys() if before[path] != after[path]}
    return [
        f"{what} {where}: {', '.join(sorted(ascii(Path(path).name) for path in paths)[:SEVERAL])}"
        for what, paths in (("made", made), ("deleted", gone), ("changed", changed))
        if paths
    ]


def ending_problems(ended: Ended, *, is_config: bool) -> list[str]:
    """An exit code that fits, one paragraph where it is not 0, nothing that a terminal obeys."""
    name, said = ended.line[0], ended.stdout + ended.stderr
    if ended.code is None:
        return ["does not end"]
    if ended.code not in range(5):
        return [f"ends with {ended.code}"]
    problems = []
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    if len(errors) != min(1, ended.code):
        problems.append(f"ends with {ended.code} and {len(errors)} paragraphs")
    fits = {1: name in ("verify", "push", "check") or is_config, 2: name != "run" or is_config}
    if not fits.get(ended.code, True):
        problems.append(f"ends with {ended.code}, which does not fit")
    if "Traceback" in said:
        problems.append("shows a traceback")
    if any((ord(sign) < 32 and sign not in "\n\r\t") or 127 <= ord(sign) < 160 for sign in said):
        problems.append("writes control characters")
    return problems


def by_its_name(ended: Ended, goal: str, link: str) -> Ended:
    """What a command said of a link's goal, whose name is the true one, by the name that the link has."""
    return replace(ended, stdout=ended.stdout.replace(goal, link))


def output_problems(name: str, ended: Ended, before: Ended, kind: str, *, damaged: bool) -> list[str]:
    """What a command that only reads says, against what it said before; `damaged`: a counted file has other bytes."""
    if kind == "times" and ended.code != before.code:
        return ["refuses a file with another time"]
    if ended.code:
        return []
    if name == "verify":
        return ["finds nothing although a file is damaged"] if damaged else []
    if name == "status":
        rows = {row.split()[0]: row.split()[:-1] for row in before.stdout.splitlines() if row.strip()}
        done = [row.split() for row in ended.stdout.splitlines() if row.split()[1:2] == ["done"]]
        return [f"status of {row[0]} is not true" for row in done if row[: len(rows.get(row[0], []))] != rows[row[0]]]
    if name not in ("plan", "compare", "check") and ended.stdout != before.stdout:
        return ["says something else than before, and ends with 0"]
    return []


def whole_shards(run: Path, reference: Path) -> list[str]:
    """The shards of the untampered run that lie in a run with the same bytes, at the same path."""
    wanted = results_of(reference)
    return sorted(name for name in wanted if name.endswith(".parquet") and digest(run / name) == wanted[name])


def result_problems(
    ended: Ended, run: Path, reference: Path, path: str, *, whole: Sequence[str], unread: bool
) -> list[str]:
    """After `run`: with 0 the results of the untampered run; otherwise each shard is whole that was so before it.

    `unread`: the file at `path` was changed as a bad disk does: its time and size are kept, and `run` does not read it.
    """
    wanted = results_of(reference)
    if ended.code:
        lost = [name for name in whole if digest(run / name) != wanted[name]]
        return [f"refuses, and {len(lost)} whole shards are lost, {lost[0]} among them"] if lost else []
    different = [name for name in wanted if digest(run / name) != wanted[name] and not (unread and name == path)]
    problems = [f"ends with 0, but these differ: {', '.join(map(ascii, different[:SEVERAL]))}"] if different else []
    said, truth = figures_of(run), figures_of(reference)
    if wrong := [key for key in truth if said.get(key) != truth[key]]:
        problems.append(f"ends with 0, but report.json differs: {', '.join(wrong)}")
    return problems


@functools.cache
def results_of(run: Path) -> Mapping[str, str]:
    """What a run made that comes out the same each time: files of its latest stages and the links to these, by path."""
    found = {}
    for link in sorted((run / "latest").iterdir()):
        found[str(link.relative_to(run))] = digest(link)
        for file in link.resolve().rglob("*"):
            inside = file.relative_to(link.resolve())
            if file.is_file() and not (VOLATILE | BOOKKEEPING) & set(inside.parts) and file.suffix != ".jsonl":
                found[str(file.relative_to(run))] = digest(file)
        for file in (link.resolve() / "quarantine").glob("*.jsonl"):
            found[str(file.relative_to(run))] = digest(file)
    return found


def digest(path: Path) -> str:
    """A file's sha256, a link's goal; empty where there is neither."""
    if path.is_symlink():
        return os.readlink(path)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def figures_of(run: Path) -> dict[str, Any]:
    """The figures of report.json that do not depend on the machine."""
    try:
        report = json.loads((run / "report.json").read_text())
    except (OSError, ValueError):
        return {}
    report.get("run", {}).get("fingerprints", {}).pop("push", None)  # a push that was tried
    found = {f"{part}.{key}": report.get(part, {}).get(key) for part, keys in FIGURES.items() for key in keys}
    native, check = report.get("check", {}).get("native", {}), report.get("check", {})
    found |= {f"check.native.{key}": native.get(key) for key in NATIVE} | {"check.passed": check.get("passed")}
    return found | {key: report.get(key) for key in WHOLE}
