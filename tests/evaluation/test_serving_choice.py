"""The fastest of vLLM's methods at each load, and what to serve over all loads."""

from __future__ import annotations

import re

import pytest

from pipeline.artifacts.check_result import GreedyMatch, LoadRow, ServedMethod, VllmFigures
from pipeline.evaluation.serving_choice import with_choices

EXACT = GreedyMatch(16, 16, 0)
SERVE = "medusa-distill serve RUN_DIR"


def row(method: str, requests: int, speed: float, plain: float = 100, **more) -> LoadRow:
    return LoadRow(
        method=method,
        requests=requests,
        tokens_per_second=speed,
        baseline_tokens_per_second=plain,
        **more,
    )


def judged(*rows: LoadRow, match: GreedyMatch = EXACT) -> VllmFigures:
    """The figures with their choices; the greedy text of the heads has this match."""
    config = {"method": "eagle", "num_speculative_tokens": 5}
    methods = [
        ServedMethod(name="heads", acceleration_rate=2.88, greedy_match=match),
        ServedMethod(name="heads with 5 drafts", speculative_config=config),
        ServedMethod(name="ngram", acceleration_rate=1.14, speculative_config={"method": "ngram"}),
        ServedMethod(name="suffix", failed="It died."),
    ]
    figures = VllmFigures(acceleration_rate=2.88, greedy_match=match, methods=methods)
    return with_choices(figures, rows)


def advice_of(*rows: LoadRow) -> list[tuple[str, str]]:
    return [(each.text, each.command) for each in judged(*rows).advice or []]


def test_each_load_has_its_fastest_method_and_margin():
    plain_ranges = {1: [90, 110], 32: [990, 1050]}
    one, many = judged(
        row("heads", 1, 163, 100, range=[160, 170], baseline_range=plain_ranges[1]),
        row("heads", 32, 900, 1000, range=[880, 950], baseline_range=plain_ranges[32]),
        row("ngram", 1, 110, 100, range=[110, 130], baseline_range=plain_ranges[1]),
        row("ngram", 32, 980, 1000, range=[970, 995], baseline_range=plain_ranges[32]),
    ).choices
    assert (one.requests, one.method, one.second) == (1, "heads", "ngram")
    assert one.margin == pytest.approx(163 / 110 - 1, abs=1e-4)
    assert one.is_beyond_scatter
    assert (many.requests, many.method, many.second) == (32, "plain", "ngram")
    assert not many.is_beyond_scatter, "its slowest repeat is slower than ngram's fastest"


def test_requests_out_of_time_do_not_count():
    """Heads are faster, and late in half of the requests; then plain decoding is always late."""
    ranges = {"range": [140, 160], "baseline_range": [90, 110]}
    late = row("heads", 2, 150, within_slo=0.5, baseline_within_slo=1.0, **ranges)
    alone = row("heads", 4, 150, within_slo=0.5, baseline_within_slo=0.0)
    none = row("heads", 8, 150, within_slo=0.0, baseline_within_slo=0.0)
    first, second = judged(late, alone, none).choices
    assert (first.method, first.second) == ("plain", "heads")
    assert first.margin == pytest.approx(100 / 75 - 1, abs=1e-4)
    assert first.is_beyond_scatter, "the slowest in time is 90, and the heads' fastest 80"
    assert (second.method, second.margin) == ("heads", None)
    ((text, command),) = advice_of(alone)
    assert (text, command) == ("4 at a time: serve heads, alone within check.slo.", SERVE)


def test_a_load_out_of_time_does_not_decide_alone():
    """At 64 plain decoding is never in time, which counts as 4x: 0.4 x 0.4 x 4 is 0.86^3."""
    rows = [row("heads", 1, 40), row("heads", 8, 40)]
    rows.append(row("heads", 64, 100, within_slo=0.01, baseline_within_slo=0.0))
    ((text, command),) = advice_of(*rows)
    assert command == f"{SERVE} --plain" and ": heads, 0.86x plain vLLM in" in text


def test_a_disturbed_load_is_not_judged():
    """A step of n-grams adds 1.14 tokens: 1.25x is within 10 %, and 2x is not."""
    rows = []
    for requests, of_ngram in ((1, 1.25), (32, 2.0)):
        rows.append(row("heads", requests, 150, speedup=1.5))
        rows.append(row("ngram", requests, 100 * of_ngram, speedup=of_ngram))
    found = judged(*rows)
    assert [choice.requests for choice in found.choices] == [1]
    assert found.advice[0].text == "1 at a time: serve heads, 1.50x plain vLLM."
    assert found.advice[1].text.startswith("32 at a time: not known. A method gained more")
    assert len(judged(*rows[:2]).advice) == len(judged(*rows[2:]).advice) == 1


def test_a_method_with_another_text_is_not_served():
    rows = [row("heads", 1, 150), row("ngram", 1, 120)]
    found = judged(*rows, match=GreedyMatch(32, 31, 0))
    assert [choice.method for choice in found.choices] == ["ngram"]
    serve = f'{SERVE} --plain -- --speculative-config \'{{"method": "ngram"}}\''
    assert [each.command for each in found.advice] == [serve]
    tie = judged(*rows, match=GreedyMatch(32, 31, 1))
    assert [choice.method for choice in tie.choices] == ["heads"]


@pytest.mark.parametrize(
    ("speed", "slowest", "verdict"),
    [
        (120, 101, "heads, 1.25x plain vLLM"),
        (120, 99, "heads, 1.25x plain vLLM, but not in every repeat"),
        (100, 99, "plain vLLM, since nothing gains 5 % on average: heads, 1.04x plain vLLM"),
    ],
)
def test_a_gain_in_some_repeats_alone_is_marked(speed, slowest, verdict):
    """A speedup below 1.05 is noise."""
    ranges = {"range": [slowest, 140], "baseline_range": [90, 100]}
    ((text, command),) = advice_of(row("heads", 8, speed, 96, **ranges))
    assert text == f"8 at a time: serve {verdict}."
    assert command == (f"{SERVE} --plain" if verdict.startswith("plain") else SERVE)


@pytest.mark.parametrize(
    ("prompts", "seen", "is_rough"),
    [(15, None, True), (16, None, False), (16, 0.25, False), (16, 0.26, True)],
)
def test_few_prompts_or_seen_answers_want_another_check(prompts, seen, is_rough):
    match = GreedyMatch(prompts, prompts, 0)
    figures = VllmFigures(acceleration_rate=2.88, greedy_match=match, seen_share=seen)
    assert not with_choices(figures, []).advice
    *rough, last = with_choices(figures, [row("heads", 1, 150)]).advice
    assert [each.command for each in rough] == (
        ["medusa-distill run RUN_DIR check.prompts=QUESTIONS.jsonl seeds.decontaminate=false"]
        if is_rough
        else []
    )
    assert last.command == SERVE


def test_loads_are_judged_together():
    """The product of the gains is largest up to 8: 1.6 x 0.97 x 1.2. The means: 1.23 and 0.72,
    over all loads (1.6 x 0.97 x 1.2 x 0.9 x 0.58)^(1/5) = 0.99.
    """
    rows = []
    for requests, speedup in ((32, 0.58), (1, 1.6), (4, 0.97), (8, 1.2), (16, 0.9)):
        rows.append(row("heads", requests, 100 * speedup))
        rows.append(row("ngram", requests, 90))
    low, high, one_server = advice_of(*rows)
    mean = "plain vLLM in the geometric mean"
    certain = "faster than plain in every repeat at 1 and 8"
    assert low == (
        f"1, 4 and 8 at a time: serve heads, 1.23x {mean} (0.97x to 1.60x by load), {certain}.",
        SERVE,
    )
    assert high[0] == (
        "16 and 32 at a time: serve plain vLLM, since nothing gains 5 % on average"
        f": ngram, 0.90x {mean} (0.90x to 0.90x by load). Heads: 0.72x {mean} (0.58x to 0.90x by"
        " load)."
    )
    assert one_server[0] == (
        "One server for 1, 4, 8, 16 and 32 at a time: serve plain vLLM, since nothing gains 5 % on"
        f" average: heads, 0.99x {mean} (0.58x to 1.60x by load)."
    )
    assert one_server[1] == high[1] == f"{SERVE} --plain"
    *_, one_server = advice_of(*rows[2:])
    assert one_server == (
        f"One server for 1, 4, 8 and 16 at a time: serve heads, 1.14x {mean}"
        f" (0.90x to 1.60x by load), {certain}.",
        SERVE,
    )


@pytest.mark.parametrize("of_heads", [0.4, 0.52])
def test_another_method_may_be_better_above_and_for_all_loads(of_heads):
    """Together heads have 2.0 x 0.4 or 2.0 x 0.52, and n-grams 1.3 x 1.06."""
    rows = [row("heads", 1, 200), row("heads", 32, 100 * of_heads)]
    served = advice_of(*rows, row("ngram", 1, 130), row("ngram", 32, 106))
    methods = [re.search("serve (\\w+),", text)[1] for text, _ in served]
    assert methods == ["heads", "ngram", "ngram"]


def test_gains_above_a_loss_are_judged_with_it():
    """0.7 x 1.2 x 1.1 is 0.92, and its cube root 0.97."""
    rows = [row("heads", load, speed) for load, speed in ((1, 70), (16, 120), (32, 110))]
    ((text, command),) = advice_of(*rows)
    assert text.startswith("1, 16 and 32 at a time: serve plain vLLM, since nothing")
    assert ": heads, 0.97x plain" in text and command == f"{SERVE} --plain"


@pytest.mark.parametrize(
    ("heads", "other", "served"),
    [
        (120, 125, "heads"),  # 4 % are noise
        (120, 130, "heads with 5 drafts"),
        (104, 108, "heads with 5 drafts"),  # the export gains nothing
    ],
)
def test_the_export_as_it_is_is_preferred(heads, other, served):
    rows = [row("heads", 1, heads), row("heads with 5 drafts", 1, other)]
    ((text, command),) = advice_of(*rows)
    assert text.startswith(f"1 at a time: serve {served}, ")
    assert command == (SERVE if served == "heads" else f"{SERVE} --draft-tokens 5")
