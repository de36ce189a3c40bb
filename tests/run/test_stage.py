"""Every stage declares the same things, and what it declares fits together."""

from __future__ import annotations

from pipeline.flow import STAGES
from pipeline.storage.run_directory import RunDirectory
from pipeline.storage.stage_directory import StageDirectory


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
