"""Functions in another Python process: results, progress, errors, and the end of the process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets.own_process import in_own_process


def work(number, report):
    report(part="counting", done=1, total=3)
    if number == 13:
        raise ConfigError("Not this one.", "number", "Take another.")
    if number == 14:
        sys.exit("no memory is left")
    time.sleep(0.7)
    if number == 16:
        return os.environ["VLLM_RPC_BASE_PATH"]
    return os.getpid() if number == 15 else number


def write_id_and_sleep(file, report):
    Path(file).write_text(str(os.getpid()))
    report(part="sleeping")
    time.sleep(60)


def test_result_and_progress_of_another_process_arrive():
    seen = []
    assert in_own_process(work, 3, lambda **progress: seen.append(progress)) == 3
    assert {"part": "counting", "done": 1, "total": 3} in seen
    assert in_own_process(work, 15) != os.getpid()


def test_errors_arrive_and_a_silent_end_with_its_last_line():
    with pytest.raises(ConfigError, match="Not this one") as refused:
        in_own_process(work, 13)
    assert (refused.value.where, refused.value.fix) == ("number", "Take another.")
    with pytest.raises(EnvironmentFault, match="status 1: no memory is left"):
        in_own_process(work, 14)


def test_an_interrupt_ends_the_other_process_too(tmp_path):
    def interrupt(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_own_process(write_id_and_sleep, str(tmp_path / "pid"), interrupt)
    pid = (tmp_path / "pid").read_text()
    assert not Path(f"/proc/{pid}").exists()
