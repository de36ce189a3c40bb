"""Which figures keep heads at home."""

from __future__ import annotations

import pytest

from pipeline.artifacts.check_result import CheckResult
from pipeline.config.load import validate
from pipeline.evaluation.limits import failures


def engine(rate: float, sequences: int = 8, identical: int = 8, ties: int = 0, **more) -> dict:
    match = {"sequences": sequences, "identical": identical, "ties": ties}
    return {"acceleration_rate": rate, "greedy_match": match, **more}


def config(least: float = 1.0, **train):
    settings = {"run": {"name": "a"}, "target": {"model": "owner/model"}, "seeds": {"sources": [{"path": "seeds"}]}}
    return validate(settings | {"check": {"min_acceleration_rate": least}, "train": train}, "test")


@pytest.mark.parametrize(
    ("measured", "least", "says"),
    [
        ({"native": engine(2.0)}, 1.0, []),
        ({"native": engine(1.0)}, 1.0, []),
        ({"native": engine(1.9)}, 2.0, ["native: acceleration rate 1.90 is below check.min_acceleration_rate = 2.00"]),
        ({"native": engine(2.0, identical=6, ties=2)}, 1.0, []),
        ({"native": engine(2.0, identical=5, ties=2)}, 1.0, ["native: 1 of 8 greedy sequences differ"]),
        ({"vllm": engine(1.5, accepted_per_position=[0.4, 0.1])}, 1.0, []),
        ({"vllm": engine(1.0, accepted_per_position=[0.0, 0.0])}, 1.0, ["vllm: no draft token was accepted"]),
        (
            {"native": engine(0.9), "vllm": engine(1.5, identical=0, accepted_per_position=[0.5])},
            1.0,
            ["native: acceleration rate 0.90", "vllm: 8 of 8 greedy sequences differ"],
        ),
    ],
)
def test_what_fails_the_check(measured, least, says):
    found = failures(CheckResult.of(measured), config(least))
    assert len(found) == len(says) and all(line.startswith(start) for line, start in zip(found, says, strict=True))


@pytest.mark.parametrize(
    ("kl", "fails"),
    [({"kl": 0.19}, False), ({"kl": 0.2}, False), ({"kl": 0.21}, True), ({"kl": float("nan")}, True), ({}, True)],
)
def test_a_backbone_that_moved_too_far_or_nobody_knows_how_far_fails_it(kl, fails):
    result = CheckResult.of({"native": engine(2.0), **kl})
    found = failures(result, config(method="medusa-2", backbone={"max_kl": 0.2}))
    assert len(found) == fails and all("above train.backbone.max_kl = 0.2" in line for line in found)
    assert failures(result, config()) == [], "Medusa-1 moves nothing"
