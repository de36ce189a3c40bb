from __future__ import annotations

import json

from pipeline.artifacts.check_result import (
    CheckResult,
    GreedyMatch,
    NativeFigures,
    TunedDrift,
    VllmFigures,
)
from pipeline.artifacts.json_form import from_json, to_json

NATIVE = NativeFigures(acceleration_rate=1.9, greedy_match=GreedyMatch(8, 5, 2))
VLLM = VllmFigures(
    acceleration_rate=1.0, greedy_match=GreedyMatch(8, 5, 2), accepted_per_position=[0.0, 0.0]
)


def test_a_result_comes_back_as_it_was_written():
    found = CheckResult(native=NATIVE, vllm=VLLM, drift=TunedDrift(kl=0.1), passed=False)
    written = json.loads(json.dumps(to_json(found)))
    assert from_json(CheckResult, written) == found
    match = {"sequences": 8, "identical": 5, "ties": 2, "tokens": 0}
    assert written["native"] == {"acceleration_rate": 1.9, "greedy_match": match}
