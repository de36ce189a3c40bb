"""Headline figures and tables say what the report holds, and nothing that it does not."""

from __future__ import annotations

import pytest

from pipeline.report.check_tables import check_table
from pipeline.report.facts import headline
from pipeline.report.tables import chain_table, heads_table, sizes_table, tree_table
from pipeline.report.warnings import warnings


@pytest.mark.parametrize(
    ("measured", "error", "says"),
    [
        (2.4, 0.3, ()),
        (2.9, 0.4, ()),  # together 0.5, of which 3 are 1.5
        (3.6, 0.4, ("80% above the expected one, 3.2 standard errors",)),
        (0.4, 0.4, ("80% below the expected one, 3.2 standard errors",)),
        (3.6, None, ()),
        (None, None, ()),
    ],
)
def test_an_expectation_that_missed_by_more_than_both_errors_explain_is_flagged(
    report, measured, error, says
):
    report["tree"] |= {"expected_acceleration_rate": 2.0, "expected_standard_error": 0.3}
    report["check"]["native"] |= {"acceleration_rate": measured, "standard_error": error}
    found = warnings(report)
    assert len(found) == len(says) and all(words in found[i] for i, words in enumerate(says))
    assert headline(report)[0].note.endswith("; 2.00 ± 0.30 expected")
    report["check"]["native"]["acceptance"] = "typical"  # of which a greedy walk foretells nothing
    assert not warnings(report)


def test_vllm_s_rate_is_held_against_the_chain_s(report):
    chain = {
        "expected_acceleration_rate": 2.5,
        "expected_standard_error": 0.1,
        "standard_error": 0.1,
    }
    report["check"]["vllm"] |= chain | {"num_speculative_tokens": 2}
    (found,) = warnings(report)  # measured 1.713
    assert found.startswith(
        "vLLM's acceleration rate is 31% below the expected one, 5.6 standard errors"
    )
    (figure,) = [figure for figure in headline(report) if figure.label == "vLLM acceleration rate"]
    assert figure.value == "1.71 ± 0.10"
    assert figure.note == "top-1 chain of 2, no tree; 2.50 ± 0.10 expected; greedy identical 32/32"


@pytest.mark.parametrize(
    ("promised", "measured", "says"),
    [
        ([0.8, 1.2], 1.1, None),
        ([0.8, 0.94], 0.9, "no expected speedup is above 1, the best 0.94x"),
        ([0.8, 0.94], None, "no expected speedup is above 1, the best 0.94x"),
        ([0.8, 0.94], 1.1, "the best 0.94x, and the check measured 1.10x"),
        ([0.8, 1.2], 0.7, "the measured speedup is 0.70x"),
        ([], 0.7, "the measured speedup is 0.70x"),
    ],
)
def test_a_tree_that_does_not_pay_is_warned_of(report, promised, measured, says):
    report["tree"] = {
        "nodes": 5,
        "sizes": [{"nodes": 4, "expected_speedup": speedup} for speedup in promised],
    }
    report["check"]["native"]["speedup"] = measured
    found = warnings(report)
    assert not found if says is None else says in found[0]


@pytest.mark.parametrize(
    ("engine", "figures"),
    [
        ("native", {"overhead": 0.97, "speedup": 2.5, "acceleration_rate": 2.4}),
        ("vllm", {"speedup": 1.9, "acceleration_rate": 1.8}),
    ],
)
def test_a_step_with_heads_that_is_faster_than_a_plain_one_is_a_warning_and_no_headline(
    report, engine, figures
):
    assert not any("slowed the plain steps" in said for said in warnings(report))
    report["check"][engine] |= figures
    (said,) = [said for said in warnings(report) if "slowed the plain steps" in said]
    assert (
        f"the speedup of {figures['speedup']:.2f}x at an acceleration rate of"
        f" {figures['acceleration_rate']}" in said
    )
    shown = {figure.label: figure for figure in headline(report)}
    if engine == "native":
        assert (
            shown["Overhead"].value == shown["Speedup"].value == "-"
            and "see the warning" in shown["Speedup"].note
        )
    else:
        assert shown["Speedup"].value != "-"


def test_a_draft_vocabulary_that_much_text_is_outside_of_is_warned_of(report):
    report["train"]["draft_coverage"] = 0.95
    assert not warnings(report)
    report["train"]["draft_coverage"] = 0.85
    assert warnings(report)[0].startswith("Only 85.0% of held-out text is in the draft vocabulary")


def test_a_chain_that_vllm_accepts_less_of_than_native_decoding_on_the_same_text_is_flagged(report):
    report["check"]["vllm"] |= {"acceleration_rate": 1.9, "same_text_acceleration_rate": 1.95}
    assert not warnings(report)
    report["check"]["vllm"]["same_text_acceleration_rate"] = 2.1
    assert "1.90, and the same chain reaches 2.10 natively on the same text" in warnings(report)[0]


def test_both_searches_are_reported_whichever_was_better(report, extras):
    report["tree"]["searches"] = {"product": 2.353, "joint": 2.334}
    note = tree_table(report, extras).note
    assert note.endswith(
        "On text not used for the search, the product search reaches 2.35, the joint search reaches"
        " 2.33."
    )


def test_the_sizes_that_were_measured_are_shown_with_what_they_promise(report):
    sizes = [
        {"nodes": 4, "overhead": 1.25, "expected_acceleration_rate": 2.5, "expected_speedup": 2.0}
    ]
    report["tree"] = {"nodes": 4, "source": "joint", "sizes": sizes}
    table = sizes_table(report)
    assert (
        table.rows == (("4", "1.25x", "2.50", "2.00x"),)
        and table.note == "The joint search; 4 nodes are used, the fastest up to 5 %."
    )
    assert sizes_table({"tree": {"nodes": 4}}).rows == ()


def test_the_chain_is_shown_by_its_number_of_tokens_with_overheads_where_they_were_timed(report):
    rows = [{"draft_tokens": 1, "expected_acceleration_rate": 1.5, "expected_standard_error": 0.1}]
    report["tree"] |= {"num_speculative_tokens": 1, "chain": rows}
    table = chain_table(report)
    assert table.columns == ("tokens", "expected rate") and table.rows == (("1", "1.50 ± 0.10"),)
    rows[0] |= {"overhead": 1.2, "expected_speedup": 1.25}
    table = chain_table(report)
    assert table.rows == (("1", "1.20x", "1.50 ± 0.10", "1.25x"),)
    assert table.note.endswith(
        "1 tokens are drafted, the fastest up to 5 % by native overheads; 1 would accept most."
    )
    assert chain_table({"tree": {"nodes": 4}}).rows == ()


def test_a_training_that_gained_nothing_is_warned_of(report):
    report["train"] |= {"steps": 450, "best_step": 0}
    assert any(
        said.startswith("None of 450 steps lowered the held-out loss") for said in warnings(report)
    )
    report["train"]["best_step"] = 450
    assert not any("held-out loss" in said for said in warnings(report))


def test_the_headline_says_what_the_search_gained_over_the_stock_tree(report):
    def ladder(**rates: float) -> list[dict]:
        return [
            {"tree": tree, "nodes": 63, "acceleration_rate": rate} for tree, rate in rates.items()
        ]

    assert "Search over stock tree" not in [figure.label for figure in headline(report)], (
        "nothing is known of it"
    )
    names = {"stock (Vicuna-7B's)": 2.0, "searched, stock size": 2.25, "the export's": 1.9}
    report["check"]["native"]["studies"]["trees"] = ladder(**names)
    (figure,) = [figure for figure in headline(report) if figure.label == "Search over stock tree"]
    assert figure.value == "+12.5%"
    assert figure.note.endswith(
        "stock tree 2.00, searched tree of the same size 2.25, used tree 1.90"
    )


def with_seen_answers(report, num_new: int) -> None:
    """32 answers of the check, of which so many are new, and 40 of calibration, of which ten are
    seen.
    """
    report["tree"] |= {
        "expected_acceleration_rate": 4.0,
        "expected_standard_error": 0.2,
        "seen_share": 0.25,
    }
    report["tree"]["new"] = {
        "answers": 30,
        "expected_acceleration_rate": 2.0,
        "expected_standard_error": 0.1,
    }
    new = {"answers": num_new}
    if num_new >= 8:
        new |= {"acceleration_rate": 2.1, "standard_error": 0.1}
    native = {
        "acceleration_rate": 2.3,
        "standard_error": 0.1,
        "seen_share": 1 - num_new / 32,
        "new": new,
    }
    report["check"]["native"] |= native


def test_the_rate_on_new_answers_stands_beside_the_rate_on_all(report):
    assert [figure.label for figure in headline(report)].count("On new answers") == 0
    with_seen_answers(report, 24)
    first, second = headline(report)[:2]
    assert first.value == "2.30 ± 0.10"
    assert (second.label, second.value) == ("On new answers", "2.10 ± 0.10")
    assert "25" in second.note and "2.00 ± 0.10" in second.note
    rows = {row[0]: row[1] for row in check_table(report).rows}
    assert rows["acceleration rate on new answers"] == "2.10 ± 0.10"
    assert rows["expected on new answers"] == "2.00 ± 0.10"


def test_expected_and_measured_are_compared_on_new_answers(report):
    """On all answers they are 1.7 apart, since more of calibration's are seen; on new ones they
    agree.
    """
    with_seen_answers(report, 24)
    assert not warnings(report)
    report["check"]["native"]["new"]["acceleration_rate"] = 3.0
    assert len(warnings(report)) == 1


def test_too_few_new_answers_have_no_rate(report):
    with_seen_answers(report, 7)
    assert headline(report)[1].value == "only 7 new answers"


def test_accuracies_on_new_answers_have_columns_of_their_own(report):
    assert len(heads_table(report).columns) == 2 + 5
    with_seen_answers(report, 24)
    for head in report["heads"]:
        head["new"] = {"top1": 0.125, "top5": 0.375}
    table = heads_table(report)
    assert all(row[-2:] == ("12.5%", "37.5%") for row in table.rows)
