"""The tampering benchmark finds a command that misses damage, mends nothing, or writes outside of a
copied run.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks import tampering
from benchmarks.tampering import DAMAGE, LINKED, Case, Record, Trial, cases, results_of
from tests.flows.tiny import latest

HEADS = ("train", "heads.safetensors")


@pytest.fixture
def found_where(finished_run, tmp_path, monkeypatch):
    """`found_where(command, case)`: what the benchmark finds where every command is this
    function.
    """

    def found(command, case: Case) -> list[str]:
        place = tmp_path / "place"
        shutil.copytree(finished_run.path, place / "plain" / "run", symlinks=True)
        monkeypatch.setattr(tampering, "command", command)
        record = Record(seed=0)
        Trial(case, place, results_of(finished_run), record).take()
        assert sorted(path.name for path in place.iterdir()) == ["plain"], "the case is taken away"
        return [f"{finding['command']} {finding['what']}" for finding in record.findings]

    return found


def test_a_blind_verify_and_a_run_without_repair_are_found(found_where):
    ends, names, bytes_made = found_where(lambda *_: (0, ""), Case(0, "moved", *HEADS, "truncate"))
    assert ends.startswith("verify ends with 0, not with 1")
    assert names.startswith("verify does not name") and "heads.safetensors" in names
    assert bytes_made.startswith("run has made other bytes")


def test_unrepaired_damage_that_verify_names_is_no_finding(found_where):
    def named(name: str, given: Path, *words: str) -> tuple[int, str]:
        if name != "verify":
            return 0, ""
        return 1, str(next(given.glob("train-*/heads.safetensors")))

    assert found_where(named, Case(0, "copied", *HEADS, "flip_unnoticed")) == []


def test_a_command_that_writes_outside_of_the_copy_is_found(found_where):
    def writes(name: str, given: Path, *words: str) -> tuple[int, str]:
        if name == "run":
            next(given.parents[2].glob("plain/run/seeds-*/DONE.json")).touch()
        return 0, ""

    (found,) = found_where(writes, Case(0, "copied", "check"))
    assert found.startswith("run has changed") and "DONE.json" in found


def test_a_linked_stage_must_be_refused(found_where):
    (ends, names) = found_where(lambda *_: (0, ""), Case(0, LINKED, "train"))
    assert ends == "run ends with 0, not with 3" and names.startswith("run does not name")


def test_cases_damage_every_file_in_every_way(finished_run):
    taken = list(cases(finished_run.path, 500, seed=0))
    expected = 0
    for stage in finished_run.stages().values():
        assert stage.done
        sizes = [facts.size for facts in stage.done.files.values()]
        expected += sum(len(DAMAGE) if size else 1 for size in sizes) + 3
    assert len({(case.stage, case.file, case.damage) for case in taken if case.damage}) == expected
    for case in taken:
        assert (latest(finished_run, case.stage).path / case.file).exists()
        assert bool(case.damage) == (case.number % 5 != 4)
