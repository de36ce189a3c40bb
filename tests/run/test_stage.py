"""Every stage declares the same things, and what it declares fits together."""

from __future__ import annotations

import pytest

from pipeline.flow import STAGES
from pipeline.run.context import skipped_stages
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory
from tests.flows.tiny import resolved


@pytest.mark.parametrize("method", ["medusa-1", "medusa-2"])
def test_a_stage_reads_only_earlier_stages_of_the_run(make_config, tmp_path, method):
    config = make_config(tmp_path, train__method=method)
    run = resolved(config)
    have = [name for name in STAGES if name not in skipped_stages(config)]
    for position, name in enumerate(have):
        assert set(STAGES[name].upstream(config)) <= set(have[:position])
        assert set(run.sections_of(name)) <= set(config.placement.of_stages())
    assert ("tuned-features" in have) == (method == "medusa-2")


def test_quarantined_rows_have_their_reasons():
    summary = {"rows": 40, "quarantined": 1210, "reasons": {"empty": 10, "too-long": 1200}}
    printed = "rows 40, quarantined 1,210 (too-long 1,200, empty 10)"
    assert STAGES["generate"].one_line(summary) == printed


def test_a_run_lists_its_stages_in_upstream_order(tmp_path):
    run = RunDirectory(tmp_path)
    upstream = {"check": ["a", "zeta"], "zeta": ["seeds"], "seeds": [], "a": ["zeta"]}
    for name, reads in upstream.items():
        directory = StageDirectory(tmp_path, name, "0" * 64)
        directory.create({"upstream": dict.fromkeys(reads, "")})
        run.link_latest(directory)
    assert list(run.stages()) == ["seeds", "zeta", "a", "check"]
