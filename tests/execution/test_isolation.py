"""Bisection finds all rows that crash their worker, and no others, in few trials."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import EnvironmentFault
from pipeline.execution.shard_worker import Outcome, find_crashing_rows
from pipeline.storage.stage_directory import StageDirectory
from tests.storage.rows import seed_row, write_shard


class Graveyard:
    """An executor whose workers die of the rows that `kills` names; it counts trials."""

    def __init__(self, kills):
        self.kills, self.trials = kills, 0

    def map(self, tasks):
        while tasks:
            task = tasks.popleft()
            self.trials += 1
            yield Outcome(task, death="gone." if self.kills(range(*task.rows)) else "")


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    """A function that bisects a shard of n rows on which a worker died."""

    def find(number, executor, max_deaths=2):
        root = tmp_path_factory.mktemp("isolation")
        write_shard(root / "in" / "0", [seed_row(str(row)) for row in range(number)])
        stage = StageDirectory(root, "generate", "a" * 64)
        source, known = root / "in" / "0", {"before": "known"}
        task = replace(stage.task(0), source=source, crashing=known)
        died = Outcome(task, death="Killed.\nIt.")
        found = find_crashing_rows(executor.map, died, stage, max_deaths)
        assert found.pop("before") and not (stage.path / "isolation").exists()
        return set(found)

    return find


@settings(max_examples=40, deadline=None)
@given(number=st.integers(1, 70), data=st.data())
def test_every_deadly_row_is_found_and_no_other(search, number, data):
    deadly = data.draw(st.sets(st.integers(0, number - 1), min_size=1, max_size=5))
    executor = Graveyard(lambda rows: bool(deadly & set(rows)))
    assert search(number, executor) == set(map(str, deadly))
    assert executor.trials <= 1 + len(deadly) * (2 * math.ceil(math.log2(max(number, 2))) + 1)


def test_rows_that_are_too_much_together_accuse_nobody(search):
    with pytest.raises(EnvironmentFault, match="none of its rows does alone: Killed "):
        search(32, Graveyard(lambda rows: len(rows) > 8))


def test_a_shard_that_survives_by_itself_is_acquitted(search):
    executor = Graveyard(lambda rows: False)
    assert search(16, executor) == set() and executor.trials == 1


def test_a_row_whose_worker_died_by_chance_is_kept(search):
    # of the trials of 8, of 4, of 2 rows and, twice, of row 11 itself; row 3 kills the whole
    bad_luck = deque([True] * 5)
    executor = Graveyard(lambda rows: 3 in rows or (11 in rows and bad_luck and bad_luck.pop()))
    assert search(16, executor, max_deaths=3) == {"3"} and not bad_luck
