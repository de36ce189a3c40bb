"""Every family of docs/models.md in miniature, through the whole flow with both kinds of heads; and
targets that are refused.
"""

from __future__ import annotations

import pytest

from benchmarks.families import FAMILIES, save_family
from pipeline.storage.shards import read_rows
from tests.flows.tiny import latest, report_of, run_again

SMALL = {
    "generate__max_new_tokens": 6,
    "calibrate__nodes": 4,
    "check__prompts": 3,
    "check__max_new_tokens": 6,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_runs_to_an_exact_check(name, make_config, tiny_seeds, tmp_path):
    usual = {
        "target__model": str(save_family(name, tmp_path / "target")),
        "target__template_arguments": FAMILIES[name].arguments or {},
        "seeds__sources": [{"path": str(tiny_seeds), "limit": 24}],
        "run__store": str(tmp_path / "store"),
    }
    for heads in ("recurrent", "medusa"):
        config = make_config(tmp_path, run__name=heads, train__heads=heads, **usual, **SMALL)
        run = run_again(config)
        check = report_of(run)["check"]
        assert check["passed"], check["failures"]
        match = check["native"]["greedy_match"]
        assert match["identical"] + match["ties"] == match["sequences"] == 3
    rows = [row for path in latest(run, "generate").shards() for row in read_rows(path)]
    assert len(rows) >= 20 and all(row["spans"] for row in rows)
