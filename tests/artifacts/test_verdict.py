"""The verdict: which figures fail a check."""

from __future__ import annotations

import math
import re

import pytest

from pipeline.artifacts.check_result import (
    CheckResult,
    GreedyMatch,
    Limits,
    NativeFigures,
    ServedModel,
    TunedDrift,
    VllmFigures,
)
from pipeline.config.load import validate


def native(rate: float, identical: int = 8, ties: int = 0, tokens: int = 500, **more):
    match = GreedyMatch(8, identical, ties, tokens)
    return NativeFigures(acceleration_rate=rate, greedy_match=match, **more)


def vllm(rate: float, *accepted: float, identical: int = 8, **more):
    match = GreedyMatch(8, identical, 0, 500)
    return VllmFigures(
        acceleration_rate=rate, greedy_match=match, accepted_per_position=list(accepted), **more
    )


def limits(least: float = 1.0, **more) -> Limits:
    settings = {
        "run": {"name": "a"},
        "target": {"model": "owner/model"},
        "seeds": {"sources": [{"path": "seeds"}]},
        "check": {"min_acceleration_rate": least},
    }
    return Limits.of(validate(settings | more, "test"))


@pytest.mark.parametrize(
    ("measured", "least", "says"),
    [
        ({"native": native(2.0)}, 1.0, []),
        ({"native": native(1.9)}, 2.0, ["native: .*1.90 is below check.min_acceleration_rate"]),
        ({"native": native(math.nan)}, 1.0, ["native: acceleration rate nan is below"]),
        ({"native": native(2.0, 3, 5, tokens=250)}, 1.0, []),
        ({"native": native(2.0, 3, 5, tokens=249)}, 1.0, ["native: 5 ties in 249 greedy tokens"]),
        (
            {"native": native(2.0, 6, largest_gap=0.043, tie_tolerance=1e-4)},
            1.0,
            ["2 of 8 .* 0.043 below .* within 0.0001 .*check.tie_tolerance"],
        ),
        ({"vllm": vllm(1.5, 0.4, 0.1)}, 1.0, []),
        ({"vllm": vllm(1.0, 0.0, 0.0)}, 1.0, ["vllm: no draft token was accepted"]),
        (
            {"native": native(0.9), "vllm": vllm(1.5, 0.5, identical=0)},
            1.0,
            ["native: acceleration rate 0.90", "vllm: 8 of 8 greedy sequences differ"],
        ),
        (
            {"served_model": ServedModel(model="copy", format="fp8", native=native(0.9))},
            1.0,
            ["on copy: native: acceleration rate 0.90"],
        ),
    ],
)
def test_what_fails_the_check(measured, least, says):
    found = CheckResult(**measured).failures(limits(least))
    assert len(found) == len(says)
    assert all(re.search(start, line) for line, start in zip(found, says, strict=True))


def expecting(rate: float, error: float | None, measured_error: float) -> dict:
    return {
        "expected_acceleration_rate": rate,
        "expected_standard_error": error,
        "standard_error": measured_error,
    }


@pytest.mark.parametrize(
    ("rate", "promise", "fails"),
    [
        (3.1, expecting(3.3, 0.2, 0.2), False),
        (2.3, expecting(3.3, 0.2, 0.2), False),  # 3.5 standard errors, and half of the gain is left
        (1.1, expecting(3.3, 0.2, 0.2), True),
        (1.05, expecting(1.8, 0.25, 0.25), False),  # 3 standard errors are more than the gain
        (1.05, expecting(1.8, 0.25, 0.1), False),  # each of the two errors counts
        (1.0, expecting(1.08, 0.001, 0.001), False),  # heads that guess next to nothing
        (1.1, expecting(3.3, None, 0.2), False),  # one conversation
        (1.1, {"same_text_acceleration_rate": 1.3}, True),  # the same answers: no sampling error
    ],
)
def test_a_served_rate_far_below_the_chain_s_fails_it(rate, promise, fails):
    found = CheckResult(vllm=vllm(rate, 0.1, **promise)).failures(limits())
    assert len(found) == fails and all(f"{rate:.2f} is far below the" in line for line in found)


@pytest.mark.parametrize(("kl", "fails"), [(0.19, 0), (0.2, 0), (0.21, 1), (None, 1)])
def test_a_drift_that_is_too_large_or_unknown_fails(kl, fails):
    result = CheckResult(native=native(2.0), drift=TunedDrift(kl=kl))
    train = {"method": "medusa-2", "backbone": {"max_kl": 0.2}}
    found = result.failures(limits(train=train))
    assert len(found) == fails and all("train.backbone.max_kl = 0.2" in line for line in found)


@pytest.mark.parametrize(
    ("head", "frequency", "fails"),
    [
        ((0.30, 0.52), (0.06, 0.20), None),
        ((0.013, 0.06), (0.06, 0.20), "top-1 accuracy is 1.3%, .* would reach 6.0%"),
        ((0.0653, 0.2868), (0.0617, 0.2372), "top-1"),  # four steps on a real chat model
        ((0.153, 0.29), (0.06, 0.20), "top-1 accuracy is 15.3%"),
        ((0.17, 0.27), (0.06, 0.20), "top-5 accuracy is 27.0%, .* reach 20.0%"),
        ((1.0, 1.0), (1.0, 1.0), None),  # text of one token
    ],
)
def test_heads_that_guess_no_better_than_token_frequencies_fail(head, frequency, fails):
    ranks = ("top1", "top5")
    result = CheckResult(
        native=native(2.0),
        head_0=dict(zip(ranks, head, strict=True)),
        frequency=dict(zip(ranks, frequency, strict=True)),
    )
    found = result.failures(limits(1.0))
    assert len(found) == (fails is not None)
    assert not fails or re.search(fails, found[0])
    assert result.failures(limits(0.0)) == []
