"""The whole flow from a target whose files are quantized: its states, its heads, its text."""

from __future__ import annotations

import pytest

from tests.flows.tiny import (
    STAGES,
    latest,
    report_of,
)
from tests.targets.quantized_copies import in_int8


@pytest.mark.slow
def test_heads_of_a_quantized_target_keep_its_text(again, tmp_path, tiny_target, tiny_seeds):
    copy = in_int8(tiny_target, tmp_path / "copy")
    few = {"seeds__sources": [{"path": str(tiny_seeds), "limit": 30}], "generate__rounds": 1}
    run = again(target__model=str(copy), train__heads="recurrent", **few)
    assert all(latest(run, name).done for name in STAGES)
    native = report_of(run)["check"]["native"]
    match = native[
        "greedy_match"
    ]  # a state that is rounded to 127 steps turns an ulp into a tie on some CPUs
    assert match["identical"] + match["ties"] == match["sequences"] == 8 and match["ties"] <= 2
    assert native["acceleration_rate"] > 1
