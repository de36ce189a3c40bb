"""Warnings say what is wrong with the figures of a report, and why heads do not pay."""

from __future__ import annotations

import pytest

from pipeline.report.warnings import report_warnings
from tests.report.conftest import figures_of, typed, with_seen_answers


@pytest.mark.parametrize(
    ("measured", "error", "num_warnings"),
    [
        (2.4, 0.3, 0),
        (2.9, 0.4, 0),  # together 0.5, of which 3 are 1.5
        (3.6, 0.4, 1),
        (0.4, 0.4, 1),
        (3.6, None, 0),
    ],
)
def test_a_rate_beyond_both_standard_errors_gives_a_warning(report, measured, error, num_warnings):
    expected = {"expected_acceleration_rate": 2.0, "expected_standard_error": 0.3}
    found = {"acceleration_rate": measured, "standard_error": error, "speedup": None}
    native, vllm = report["check"]["native"], report["check"]["vllm"]
    report["tree"] |= expected
    native |= found
    assert len(report_warnings(typed(report))) == num_warnings
    native["acceptance"] = "typical"  # a greedy walk predicts nothing of it
    assert not report_warnings(typed(report))
    vllm |= found | expected  # held against the expectation of its own chain
    assert len(report_warnings(typed(report))) == num_warnings


@pytest.mark.parametrize(
    ("sequences", "seen", "warned"),
    [
        (16, 0.25, []),
        (15, None, ["Rough figures: the check decoded 15 prompts"]),
        (16, 0.471, ["47.1% of its answers"]),
    ],
)
def test_figures_of_little_text_are_warned_of(report, sequences, seen, warned):
    report["check"]["native"]["seen_share"] = seen
    report["check"]["native"]["greedy_match"]["sequences"] = sequences
    found = report_warnings(typed(report))
    assert len(found) == len(warned)
    for words, warning in zip(warned, found, strict=True):
        assert words in warning


def test_steps_faster_with_heads_than_without_are_doubted(report):
    report["check"]["native"] |= {"overhead": 0.97, "speedup": 2.7, "acceleration_rate": 2.4}
    assert len(report_warnings(typed(report))) == 1
    shown = figures_of(report)
    assert shown["overhead"] == shown["speedup"] == "-"
    report["check"]["native"]["speedup"] = 1.6
    too_fast = {"method": "heads", "speedup": 1.25, "acceleration_rate": 1.1}
    too_fast |= {"tokens_per_second": 125.0, "baseline_tokens_per_second": 100.0}
    vllm = report["check"]["vllm"]
    vllm |= {"methods": [{"name": "heads"}], "loads": [{**too_fast, "requests": 8}]}
    assert not report_warnings(typed(report)), "in a batch it may be right"
    vllm["loads"].append({**too_fast, "requests": 1})
    (warning,) = report_warnings(typed(report))
    assert "in vLLM, 1 request at a time 1.25x, 1.10" in warning


def drawn(prompts: int, held_out: int) -> list[dict[str, object]]:
    """Two sources of equal size; the first gives all prompts that the second does not."""
    counts = {"a": (32 - prompts, 40), "b": (prompts, held_out)}
    return [
        {"source": name, "conversations": 900, "held_out": room, "prompts": number}
        for name, (number, room) in counts.items()
    ]


def test_a_source_with_too_few_held_out_rows_is_named(report):
    report["check"]["prompt_sources"] = drawn(4, 4)
    (warning,) = report_warnings(typed(report))
    assert "32 prompts: b 4 of 16." in warning


@pytest.mark.parametrize(
    ("part", "harmless", "harmful"),
    [
        ("train", {"draft_coverage": 0.95}, {"draft_coverage": 0.85}),
        ("train", {"steps": 9, "best_step": 9}, {"steps": 9, "best_step": 0}),
        ("seeds", {"warnings": None}, {"warnings": ["Too alike."]}),
        ("train", {"warnings": []}, {"warnings": ["Too few."]}),
        ("check", {"contaminated_rows": 0}, {"contaminated_rows": 3}),
        ("check", {"prompt_sources": drawn(16, 16)}, {"prompt_sources": drawn(4, 4)}),
    ],
)
def test_harmful_findings_of_stages_are_warnings(report, part, harmless, harmful):
    report[part] |= harmless
    assert not report_warnings(typed(report))
    report[part] |= harmful
    assert len(report_warnings(typed(report))) == 1


def test_expected_and_measured_are_compared_on_new_answers(report):
    """On all answers they are 1.7 apart: calibration has more seen ones. On new ones they agree."""
    with_seen_answers(report, 24)
    assert not report_warnings(typed(report))
    report["check"]["native"]["new"]["acceleration_rate"] = 3.0
    assert len(report_warnings(typed(report))) == 1


def test_plain_decoding_that_varies_is_warned_of(report):
    """From 100 to 150 tokens/s is 1.5x, and from 71 to 313 is more."""
    native, vllm = report["check"]["native"], report["check"]["vllm"]
    native |= {"range": [240, 260], "baseline_range": [100, 150]}
    vllm["methods"] = [{"name": "heads"}]
    speeds = {"tokens_per_second": 400.0, "baseline_tokens_per_second": 120.0}
    row = {"method": "heads", "requests": 8, "baseline_range": [100, 150], **speeds}
    vllm["loads"] = [row]
    assert not report_warnings(typed(report))
    vllm["loads"][0]["baseline_range"] = [71, 313]
    (warning,) = report_warnings(typed(report))
    assert "in vLLM, 8 at a time 71.0 to 313" in warning and "natively" not in warning


LOSING = {"speedup": 0.8, "tokens_per_second": 80.0, "baseline_tokens_per_second": 100.0}


@pytest.mark.parametrize(
    ("part", "found", "reason"),
    [
        ("seeds", {"train_rows": 36}, "36 training prompts, 300 or more help"),
        ("train", {"steps": 58}, "58 training steps, 100 or more help"),
        ("native", {"target_parameters": 6_543_210}, "a target of 6.5M parameters"),
        ("hardware", {"gpus": []}, "a CPU, on which"),
        ("native", {"seen_share": 0.47}, "47.0% of the answers"),
        (
            "vllm",
            {"accepted_per_position": [0.8]},
            "a chain of 1 in vLLM, all of it kept in 80.0%",
        ),
    ],
)
def test_where_heads_lose_the_known_reasons_that_hold_are_named(report, part, found, reason):
    report["hardware"] = {"gpus": ["H100"]}
    report["tree"]["chain"] = [{"draft_tokens": n, "new": {"answers": 9}} for n in (1, 2, 3)]
    native = report["check"]["native"]
    whole = {**report, **report["check"]}
    assert not report_warnings(typed(report))
    whole[part] |= found
    native |= LOSING
    named = [each for each in report_warnings(typed(report)) if reason in each]
    assert named[-1].startswith("Heads do not pay natively. Possible reasons: ")
    native |= {"speedup": 1.6, "tokens_per_second": 160.0}
    assert not any("do not pay" in each for each in report_warnings(typed(report)))


def test_heads_that_lose_in_vllm_alone_are_explained_too(report):
    report["seeds"]["train_rows"] = 36
    vllm = report["check"]["vllm"]
    vllm["methods"] = [{"name": "heads"}]
    vllm["loads"] = [{"method": "heads", "requests": 1, **LOSING}]
    (warning,) = report_warnings(typed(report))
    assert warning.startswith("Heads do not pay in vLLM, 1 request at a time. Possible reasons: 36")
