"""The fastest of vLLM's methods at each load, and whether that is certain."""

from __future__ import annotations

import pytest

from pipeline.artifacts.check_result import LoadRow
from pipeline.evaluation.serving_choice import serving_choices


def row(method: str, requests: int, speed: float, plain: float, **more) -> LoadRow:
    return LoadRow(
        method=method,
        requests=requests,
        tokens_per_second=speed,
        baseline_tokens_per_second=plain,
        **more,
    )


def test_each_load_has_its_fastest_method_and_margin():
    plain_ranges = {1: [90, 110], 32: [990, 1050]}
    one, many = serving_choices(
        [
            row("heads", 1, 163, 100, range=[160, 170], baseline_range=plain_ranges[1]),
            row("heads", 32, 900, 1000, range=[880, 950], baseline_range=plain_ranges[32]),
            row("ngram", 1, 120, 100, range=[110, 130], baseline_range=plain_ranges[1]),
            row("ngram", 32, 980, 1000, range=[970, 995], baseline_range=plain_ranges[32]),
        ]
    )
    assert (one.requests, one.method, one.second) == (1, "heads", "ngram")
    assert one.speedup == 1.63 and one.margin == pytest.approx(163 / 120 - 1, abs=1e-4)
    assert one.is_beyond_scatter is True
    assert (many.requests, many.method, many.second, many.speedup) == (32, "plain", "ngram", 1)
    assert many.is_beyond_scatter is False, "its slowest repeat is slower than ngram's fastest"


def test_with_one_repeat_the_scatter_is_unknown():
    (choice,) = serving_choices([row("heads", 4, 200, 100)])
    assert (choice.method, choice.margin, choice.is_beyond_scatter) == ("heads", 1.0, None)


def test_requests_out_of_time_do_not_count():
    """Heads are faster, and late in half of the requests; then plain decoding is always late."""
    late = row("heads", 2, 150, 100, within_slo=0.5, baseline_within_slo=1.0)
    alone = row("heads", 4, 150, 100, within_slo=0.5, baseline_within_slo=0.0)
    none = row("heads", 8, 150, 100, within_slo=0.0, baseline_within_slo=0.0)
    first, second = serving_choices([late, alone, none])
    assert (first.method, first.second) == ("plain", "heads")
    assert first.margin == pytest.approx(100 / 75 - 1, abs=1e-4)
    assert (second.method, second.margin, second.speedup) == ("heads", None, 1.5)
