"""What is told of a check's progress in one process is what another reads."""

from __future__ import annotations

import pytest

from pipeline.evaluation import check_progress as told
from pipeline.evaluation.check_progress import Progress, Standing, read_standing
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.speed import take_turns


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(told, "SECONDS_BETWEEN_WRITES", 0.0)


def test_what_is_told_is_what_is_read(tmp_path):
    file = tmp_path / "progress"
    assert read_standing(file) is None
    progress = Progress(file)
    progress.begin("native", 36)
    assert read_standing(file) == Standing("native", 0, 36, "prompts")
    progress.advance()
    progress.advance(2)
    assert read_standing(file) == Standing("native", 3, 36, "prompts")
    progress.begin("vLLM", 0, done=36, unit="prompts at once")
    assert read_standing(file) == Standing("vLLM", 36, 0, "prompts at once")


def test_a_file_that_is_half_written_says_nothing(tmp_path):
    (tmp_path / "progress").write_text('{"part": "nat')
    assert read_standing(tmp_path / "progress") is None


def test_a_disk_that_takes_no_more_stops_nothing(tmp_path):
    progress = Progress(tmp_path / "not" / "there")
    progress.begin("native", 1)
    progress.advance()


def test_every_prompt_is_counted_once_whatever_the_number_of_methods(tmp_path):
    progress = Progress(tmp_path / "progress")
    progress.begin("native", 3)
    seen = []

    def decode(ids, seed):
        standing = read_standing(tmp_path / "progress")
        seen.append(standing.done if standing else None)

    take_turns({"plain": decode, "medusa": decode}, [Prompt(str(n), [n]) for n in range(3)], progress=progress)
    assert seen == [0, 0, 1, 1, 2, 2] and read_standing(tmp_path / "progress").done == 3
