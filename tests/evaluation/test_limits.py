"""Which figures keep heads at home."""

from __future__ import annotations

import re

import pytest

from pipeline.artifacts.check_result import CheckResult, Limits
from pipeline.artifacts.json_form import from_json
from pipeline.config.load import validate


def engine(rate: float, sequences: int = 8, identical: int = 8, ties: int = 0, **more) -> dict:
    match = {"sequences": sequences, "identical": identical, "ties": ties}
    return {"acceleration_rate": rate, "greedy_match": match, **more}


def config(least: float = 1.0, **train):
    settings = {
        "run": {"name": "a"},
        "target": {"model": "owner/model"},
        "seeds": {"sources": [{"path": "seeds"}]},
    }
    return validate(settings | {"check": {"min_acceleration_rate": least}, "train": train}, "test")


def failures(result: CheckResult, config) -> list[str]:
    return result.failures(Limits.of(config))


@pytest.mark.parametrize(
    ("measured", "least", "says"),
    [
        ({"native": engine(2.0)}, 1.0, []),
        ({"native": engine(1.0)}, 1.0, []),
        (
            {"native": engine(1.9)},
            2.0,
            ["native: acceleration rate 1.90 is below check.min_acceleration_rate = 2.00"],
        ),
        ({"native": engine(2.0, identical=6, ties=2)}, 1.0, []),
        (
            {"native": engine(2.0, identical=5, ties=3)},
            1.0,
            ["native: 3 of 8 greedy sequences differ at ties"],
        ),
        ({"native": engine(2.0, sequences=2, identical=1, ties=1)}, 1.0, []),
        (
            {"native": engine(2.0, identical=5, ties=2)},
            1.0,
            ["native: 1 of 8 greedy sequences differ"],
        ),
        ({"vllm": engine(1.5, accepted_per_position=[0.4, 0.1])}, 1.0, []),
        (
            {"vllm": engine(1.0, accepted_per_position=[0.0, 0.0])},
            1.0,
            ["vllm: no draft token was accepted"],
        ),
        (
            {"native": engine(0.9), "vllm": engine(1.5, identical=0, accepted_per_position=[0.5])},
            1.0,
            ["native: acceleration rate 0.90", "vllm: 8 of 8 greedy sequences differ"],
        ),
    ],
)
def test_what_fails_the_check(measured, least, says):
    found = failures(from_json(CheckResult, measured), config(least))
    assert len(found) == len(says) and all(
        line.startswith(start) for line, start in zip(found, says, strict=True)
    )


def test_a_difference_that_is_no_tie_says_how_far_from_one_it_is_and_which_setting_decides():
    measured = {"native": engine(2.0, identical=6, largest_gap=0.043, tie_tolerance=1e-4)}
    (said,) = failures(from_json(CheckResult, measured), config())
    assert (
        "2 of 8" in said
        and "is up to 0.043; up to check.tie_tolerance = 0.0001 it is a tie" in said
    )


def expecting(rate: float, error: float, measured_error: float) -> dict:
    return {
        "expected_acceleration_rate": rate,
        "expected_standard_error": error,
        "standard_error": measured_error,
    }


@pytest.mark.parametrize(
    ("rate", "promise", "fails"),
    [
        (3.1, expecting(3.3, 0.2, 0.2), False),
        (5.0, expecting(3.3, 0.2, 0.2), False),  # higher is fine
        (
            2.3,
            expecting(3.3, 0.2, 0.2),
            False,
        ),  # 3.5 standard errors, and more than half of the gain
        (1.1, expecting(3.3, 0.2, 0.2), True),
        (
            1.05,
            expecting(1.8, 0.25, 0.25),
            False,
        ),  # 12 conversations: 3 standard errors are more than the gain
        (
            1.0,
            expecting(1.08, 0.001, 0.001),
            False,
        ),  # heads that guess hardly anything have nothing to lose
        (1.1, expecting(3.3, None, 0.2), False),  # one conversation
        (1.1, {}, False),
        (
            1.1,
            {"same_text_acceleration_rate": 1.3},
            True,
        ),  # of the same answers there is no sampling error
        (1.2, {"same_text_acceleration_rate": 1.3}, False),
        (
            1.9,
            expecting(3.3, 0.1, 0.1) | {"same_text_acceleration_rate": 1.9},
            False,
        ),  # other text than expected
    ],
)
def test_a_served_rate_far_below_the_chain_s_fails_it(rate, promise, fails):
    found = failures(
        from_json(CheckResult, {"vllm": engine(rate, accepted_per_position=[0.1], **promise)}),
        config(),
    )
    assert len(found) == fails and all(f"{rate:.2f} is far below the" in line for line in found)


@pytest.mark.parametrize(
    ("kl", "fails"),
    [
        ({"kl": 0.19}, False),
        ({"kl": 0.2}, False),
        ({"kl": 0.21}, True),
        ({}, True),
    ],
)
def test_a_backbone_that_moved_too_far_or_nobody_knows_how_far_fails_it(kl, fails):
    result = from_json(CheckResult, {"native": engine(2.0), "drift": kl})
    found = failures(result, config(method="medusa-2", backbone={"max_kl": 0.2}))
    assert len(found) == fails and all(
        "above train.backbone.max_kl = 0.2" in line for line in found
    )


@pytest.mark.parametrize(
    ("head", "frequency", "fails"),
    [
        ((0.30, 0.52), (0.06, 0.20), None),
        (
            (0.013, 0.06),
            (0.06, 0.20),
            "top-1 accuracy is 1.3%, .* most frequent tokens would reach 6.0%",
        ),
        (
            (0.06, 0.30),
            (0.06, 0.20),
            "top-1 accuracy",
        ),  # it has learned to name the most frequent token
        (
            (0.0653, 0.2868),
            (0.0617, 0.2372),
            "top-1 accuracy is 6.5%",
        ),  # four steps on a real chat model
        ((0.155, 0.29), (0.06, 0.20), None),  # a tenth of what frequency misses
        ((0.153, 0.29), (0.06, 0.20), "top-1 accuracy is 15.3%"),
        ((0.17, 0.27), (0.06, 0.20), "top-5 accuracy is 27.0%, .* reach 20.0%"),
        ((1.0, 1.0), (1.0, 1.0), None),  # text of one token
        ((0.9, 0.99), (0.5, 1.0), None),  # text of five
    ],
)
def test_heads_that_guess_no_better_than_token_frequencies_fail_it(head, frequency, fails):
    ranks = {"head_0": head, "frequency": frequency}
    measured = {
        name: dict(zip(("top1", "top5"), values, strict=True)) for name, values in ranks.items()
    }
    found = failures(from_json(CheckResult, {"native": engine(2.0), **measured}), config(0.0))
    assert len(found) == (fails is not None)
    assert not fails or re.search(fails, found[0])
    lenient = config(0.0)
    lenient = lenient.model_copy(
        update={"check": lenient.check.model_copy(update={"require_learning": False})}
    )
    assert failures(from_json(CheckResult, {"native": engine(2.0), **measured}), lenient) == []
