"""What is wrong with what leaves a run that somebody had tampered with: `benchmarks.tampering`.

A push, an archive and what is restored of it, the figures of `check`, the table of `compare`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from benchmarks.endings import NATIVE, SEVERAL, Ended, digest

Published = Mapping[str, Mapping[str, bytes]]  # files by name, by repository
NOT_KNOWN = ("-", "not run")  # cells of a run that is not as far


def published_problems(ended: Ended, found: Published, wanted: Published, *, but: Collection[str] = ()) -> list[str]:
    """After a push: with 0 what the untampered run's left on the Hub, byte for byte; otherwise nothing is visible.

    `but` names files that may differ: the card, where the report that it tells of was tampered with.
    """
    if ended.code:
        return [f"refuses, and this is visible: {', '.join(found)}"] if found else []
    problems = []
    for repository in sorted({*found, *wanted}):
        ours, theirs = found.get(repository, {}), wanted.get(repository, {})
        different = sorted(
            name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name) and name not in but
        )
        if different:
            problems.append(f"pushes to {repository} something else: {', '.join(map(ascii, different[:SEVERAL]))}")
    return problems


def figures_of_check(out: Path) -> dict[str, Any]:
    """What `check --out` has written that no clock has a part in: the rates, and the text of the answers."""
    try:
        native = json.loads((out / "check.json").read_text())["check"]["native"]
        files = sorted((out / "answers").glob("*.jsonl"))
        answers = {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in files}
    except (OSError, ValueError, LookupError, TypeError):
        return {}
    turns = {name: [choice["turns"] for line in lines for choice in line["choices"]] for name, lines in answers.items()}
    return {"native": {key: native.get(key) for key in NATIVE}, "answers": turns}


def checked_problems(ended: Ended, found: Mapping[str, Any], wanted: Mapping[str, Any], *, damaged: bool) -> list[str]:
    """After `check`: any heads decode the target's own text; heads that are as they were reach the rates they had."""
    if ended.code:
        return [] if damaged or ended.code != 1 else ["fails heads that are as they were"]
    if found.get("answers") != wanted["answers"]:
        return ["ends with 0, and the answers are not the target's"]
    return [] if damaged or found == wanted else ["ends with 0, but the rates differ"]


def compared_problems(ended: Ended, before: Ended) -> list[str]:
    """After `compare`: the other run's column is as it was; this one's too, or says what is not known, and why."""
    if ended.code:
        return []
    told, truth = _cells(ended.stdout), _cells(before.stdout)
    problems = [f"the row '{label}' is gone" for label in truth if label not in told]
    for label in truth.keys() & told.keys():
        (mine, *other), (mine_before, *other_before) = told[label], truth[label]
        if other != other_before or mine not in (mine_before, *NOT_KNOWN):
            problems.append(f"'{label}' is not true")
    is_less = any(told[label] != truth[label] for label in truth.keys() & told.keys())
    if is_less and "! run " not in ended.stdout:
        problems.append("knows less of a run, and does not say why")
    return problems


def _cells(table: str) -> dict[str, list[str]]:
    rows = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if not line.startswith("!")]
    return {row[0]: row[1:] for row in rows if len(row) > 2}


def copied_problems(run: Path, restored: Path, counted: Mapping[str, str], *, some: bool) -> list[str]:
    """What was restored: each file is as it was made or as it lies in the run; none that is whole is left out.

    `some` may be left out: stages that the run does not name any more.
    """
    strange = [
        name for name in _files(restored) if digest(restored / name) not in (digest(run / name), counted.get(name))
    ]
    problems = [f"restores something else: {', '.join(map(ascii, strange[:SEVERAL]))}"] if strange else []
    gone = [name for name in counted if digest(run / name) == counted[name] and not (restored / name).is_file()]
    if gone and not some:
        problems.append(f"leaves out {', '.join(gone[:SEVERAL])}")
    return problems


def half_restored_problems(run: Path, restored: Path) -> list[str]:
    """After a `restore` that refused: what was restored is as it was archived, and is no run."""
    if (restored / "run.yaml").exists():
        return ["refuses, and what it leaves is a run"]
    return copied_problems(run, restored, {}, some=True)


def _files(place: Path) -> list[str]:
    """The files of a directory, by path; neither locks nor what is half written."""
    found = (path for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(str(path.relative_to(place)) for path in found if path.name != "lock" and path.suffix != ".tmp")
