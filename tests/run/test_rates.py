"""How long a run will take is taken from runs that did the same on the same hardware."""

from __future__ import annotations

import json
import os

from pipeline.execution.hardware import hardware
from pipeline.run.rates import rates_of_runs


def test_training_is_timed_by_a_run_of_the_same_heads_and_generating_by_any_of_the_target(make_config, tmp_path):
    config = make_config(tmp_path, train__heads="medusa", train__num_heads=3)
    for name, drafter, rate in (("a", "3 heads", 10.0), ("b", "3 draft steps", 20.0), ("c", "4 heads", 30.0)):
        report = {"target": config.target.model, "hardware": hardware(), "method": "medusa-1", "drafter": drafter}
        report |= {stage: {"tokens_per_second": rate} for stage in ("generate", "train")}
        path = config.run.root / name / "report.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(report))
        os.utime(path, (rate, rate))
    found = rates_of_runs(config)
    assert found["train"].tokens_per_second == 10 and "run a" in found["train"].source
    assert found["generate"].tokens_per_second == 30, "the newest, of whatever heads"
    recurrent = rates_of_runs(make_config(tmp_path, train__heads="recurrent", train__num_heads=3))
    assert recurrent["train"].tokens_per_second == 20
