"""The fastest of vLLM's methods at each load, and whether that is certain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeline.artifacts.check_result import (
    GreedyMatch,
    LoadRow,
    ServedMethod,
    ServingChoice,
    VllmFigures,
)
from pipeline.evaluation.serving_choice import serving_advice, serving_choices, with_choices


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


@pytest.mark.parametrize(
    ("spread", "chosen"), [([101, 140], ("heads", "plain")), ([95, 140], ("plain", "heads"))]
)
def test_a_method_is_chosen_where_it_is_certainly_faster(spread, chosen):
    """Plain decoding has 90 to 100 tokens/s, and heads 120 in the median of their repeats."""
    plain = {"baseline_range": [90, 100]}
    (found,) = serving_choices([row("heads", 8, 120, 95, range=spread, **plain)])
    assert (found.method, found.second) == chosen
    assert found.is_beyond_scatter is (chosen[0] == "heads")
    assert found.speedup == (pytest.approx(120 / 95, abs=1e-4) if chosen[0] == "heads" else 1)


def test_a_certain_method_is_chosen_before_a_faster_one():
    plain = {"baseline_range": [90, 100]}
    wide = row("heads", 8, 120, 95, range=[95, 140], **plain)
    narrow = row("ngram", 8, 110, 95, range=[108, 112], **plain)
    (found,) = serving_choices([wide, narrow])
    assert (found.method, found.second, found.is_beyond_scatter) == ("ngram", "heads", False)
    assert found.margin == pytest.approx(110 / 120 - 1, abs=1e-4)


def test_requests_out_of_time_do_not_count():
    """Heads are faster, and late in half of the requests; then plain decoding is always late."""
    ranges = {"range": [140, 160], "baseline_range": [90, 110]}
    late = row("heads", 2, 150, 100, within_slo=0.5, baseline_within_slo=1.0, **ranges)
    alone = row("heads", 4, 150, 100, within_slo=0.5, baseline_within_slo=0.0)
    none = row("heads", 8, 150, 100, within_slo=0.0, baseline_within_slo=0.0)
    first, second = serving_choices([late, alone, none])
    assert (first.method, first.second) == ("plain", "heads")
    assert first.margin == pytest.approx(100 / 75 - 1, abs=1e-4)
    assert first.is_beyond_scatter is True, "the slowest in time is 90, and the heads' fastest 80"
    assert (second.method, second.margin, second.speedup) == ("heads", None, 1.5)


def test_a_disturbed_load_has_no_choice():
    """A step of n-grams adds 1.14 tokens: 1.25x is within 10 %, and 2x is not."""
    match = GreedyMatch(2, 2, 0)
    methods = [
        ServedMethod(name="heads", acceleration_rate=2.88),
        ServedMethod(name="ngram", acceleration_rate=1.14),
        ServedMethod(name="suffix", failed="It died."),
    ]
    figures = VllmFigures(acceleration_rate=2.88, greedy_match=match, methods=methods)
    rows = []
    for requests, of_ngram in ((1, 1.25), (32, 2.0)):
        rows.append(row("heads", requests, 150, 100, speedup=1.5))
        rows.append(row("ngram", requests, 100 * of_ngram, 100, speedup=of_ngram))
    found = with_choices(figures, rows)
    assert [choice.requests for choice in found.choices] == [1] and found.disturbed_loads == [32]
    assert found.advice[0].text.startswith("1 at a time: serve heads")
    assert found.advice[1].text.startswith("32 at a time: not known. A method gained more")
    assert with_choices(figures, rows[:2]).disturbed_loads is None


def test_a_method_with_another_text_is_not_chosen():
    methods = [
        ServedMethod(name="heads", greedy_match=GreedyMatch(32, 31, 0)),
        ServedMethod(name="ngram", greedy_match=GreedyMatch(32, 30, 2)),
    ]
    figures = VllmFigures(acceleration_rate=2.0, greedy_match=methods[0].greedy_match)
    figures = replace(figures, methods=methods)
    rows = [row("heads", 1, 150, 100), row("ngram", 1, 120, 100)]
    assert [choice.method for choice in with_choices(figures, rows).choices] == ["ngram"]


# --- in words


def choice(requests: int, method: str, speedup: float, second: str, margin: float, beyond=None):
    return ServingChoice(
        requests=requests,
        method=method,
        speedup=speedup,
        second=second,
        margin=margin,
        is_beyond_scatter=beyond,
    )


def advice_of(*choices: ServingChoice) -> list[tuple[str, str]]:
    methods = [
        ServedMethod(name="heads", speculative_config={"method": "eagle"}),
        ServedMethod(
            name="heads with 5 drafts",
            speculative_config={"method": "eagle", "num_speculative_tokens": 5},
        ),
        ServedMethod(name="ngram", speculative_config={"method": "ngram"}),
    ]
    return [(each.text, each.command) for each in serving_advice(choices, methods)]


def test_each_load_has_its_verdict_and_command():
    one = choice(1, "heads", 1.63, "ngram", 0.358, True)
    many = choice(32, "plain", 1.0, "heads", -0.2, False)  # 1.25 times as fast, within the scatter
    assert advice_of(one, many) == [
        (
            "1 at a time: serve heads, 1.63x plain vLLM.",
            "medusa-distill serve RUN_DIR",
        ),
        (
            "32 at a time: serve none, since no method is faster than plain vLLM beyond the scatter"
            " of the repeats (heads came to 1.25x).",
            "medusa-distill serve RUN_DIR --plain",
        ),
    ]


@pytest.mark.parametrize(
    ("loads", "named"), [((1, 32), "1 and 32 at a time"), ((1, 2, 4), "1, 2 and 4 at a time")]
)
def test_loads_with_the_same_method_are_one_sentence(loads, named):
    choices = [choice(loads[0], "ngram", 1.1, "suffix", 0.1)]
    choices += [choice(load, "ngram", 4.4, "heads", 0.3) for load in loads[1:]]
    ((sentence, command),) = advice_of(*choices)
    assert sentence == f"{named}: serve ngram, 1.10x to 4.40x plain vLLM."
    serve = "medusa-distill serve RUN_DIR --plain -- --speculative-config"
    assert command == serve + ' \'{"method": "ngram"}\''


def test_loads_that_alternate_are_one_sentence_for_each_method():
    heads = [choice(load, "heads", 1.3, "plain", 0.3, True) for load in (1, 8)]
    plain = [choice(load, "plain", 1.0, "heads", -0.2, False) for load in (4, 16)]
    (of_heads, _), (of_plain, _) = advice_of(heads[0], plain[0], heads[1], plain[1])
    assert of_heads.startswith("1 and 8 at a time: serve heads")
    assert of_plain.startswith("4 and 16 at a time: serve none")


@pytest.mark.parametrize(
    ("at_many", "text", "command"),
    [
        (
            90,
            "serve heads, 1.20x plain vLLM in the geometric mean, 0.90x to 1.60x.",
            "medusa-distill serve RUN_DIR",
        ),
        (
            40,
            "serve none, since heads comes to 0.80x plain vLLM in the geometric mean, 0.40x to"
            " 1.60x.",
            "medusa-distill serve RUN_DIR --plain",
        ),
    ],
)
def test_one_server_for_all_loads_has_the_highest_mean_speedup(at_many, text, command):
    """1.6 and 0.9 have the geometric mean 1.2, 1.6 and 0.4 the mean 0.8; n-grams' is lower."""
    match = GreedyMatch(2, 2, 0)
    methods = [ServedMethod(name="heads"), ServedMethod(name="ngram")]
    figures = VllmFigures(acceleration_rate=2.0, greedy_match=match, methods=methods)
    rows = [row("heads", 1, 160, 100), row("heads", 32, at_many, 100)]
    rows += [row("ngram", 1, 100, 100), row("ngram", 32, 50, 100)]
    first, second, both = with_choices(figures, rows).advice
    assert first.loads == "1 at a time" and second.loads == "32 at a time"
    assert both.text == f"One server for all of these: {text}"
    assert both.command == command
    (alone,) = with_choices(figures, [row("heads", 1, 160, 100)]).advice
    assert alone.loads == "1 at a time"


def test_a_late_method_does_not_serve_all_loads():
    match = GreedyMatch(2, 2, 0)
    methods = [ServedMethod(name="heads"), ServedMethod(name="ngram")]
    figures = VllmFigures(acceleration_rate=2.0, greedy_match=match, methods=methods)
    rows = [row("heads", 1, 300, 100), row("ngram", 1, 120, 100)]
    rows += [
        row("heads", 32, 300, 100, within_slo=0.0, baseline_within_slo=1.0),
        row("ngram", 32, 120, 100, within_slo=1.0, baseline_within_slo=1.0),
    ]
    *_, both = with_choices(figures, rows).advice
    assert both.text.startswith("One server for all of these: serve ngram, 1.20x plain vLLM")


def test_other_numbers_of_draft_tokens_become_the_export_s():
    ((_, command),) = advice_of(choice(1, "heads with 5 drafts", 2.0, "heads", 0.1))
    assert command == (
        "medusa-distill run RUN_DIR calibrate.draft_tokens=5 && medusa-distill serve RUN_DIR"
    )
