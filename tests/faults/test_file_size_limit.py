"""A file reaches the largest size that is allowed (`ulimit -f`) while a stage is at work: a full
disk, for one file.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.app import app, main
from pipeline.cli.ending import ends_well
from pipeline.errors import EnvironmentFault
from pipeline.flow import STAGES as STAGES_BY_NAME
from tests.faults.unfinished import (
    assert_as_uninterrupted,
    cut_before,
    temporary_files,
    write_config,
)
from tests.flows.tiny import STAGES
from tests.forks import in_a_fork

pytestmark = pytest.mark.fault


def run_with_a_limit(config: Path, stage: str, limit: int) -> None:
    """Run the command; from the beginning of this stage no file may be larger than so many
    bytes.
    """
    real = STAGES_BY_NAME[stage].run

    def run(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return real(*arguments)

    STAGES_BY_NAME[stage] = replace(STAGES_BY_NAME[stage], run=run)
    sys.argv = ["medusa-distill", "run", str(config), "--executor", "inline"]
    main()


@pytest.mark.parametrize(
    ("stage", "limit"),
    [(stage, 16_384) for stage in STAGES]
    + [("generate", 1024), ("calibrate", 1024), ("check", 1024)],
)
def test_a_file_size_limit_stops_a_stage_and_the_same_command_finishes(
    copied_run, finished_run, make_settings, tmp_path, stage, limit
):
    cut_before(copied_run, stage)
    config = write_config(tmp_path / "config.yaml", make_settings(tmp_path))
    ended, said = in_a_fork(run_with_a_limit, config, stage, limit)
    assert ended == EnvironmentFault.exit_code, said
    assert temporary_files(copied_run) == []
    assert (
        ends_well(lambda: app(["run", str(config), "--executor", "inline"], standalone_mode=False))
        == 0
    )
    assert_as_uninterrupted(copied_run, finished_run)
