"""report.json and report.md: what is written is what was handed over."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import markdown_it
import numpy as np
import pytest

from tests.report.conftest import write_report

pytestmark = pytest.mark.usefixtures("unrendered_plots")  # tests/report/test_plots.py looks at them


def _read_json(directory: Path) -> dict:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(
        (directory / "report.json").read_text(encoding="utf-8"), parse_constant=refuse
    )


def _cells(text: str) -> dict[str, list[list[str]]]:
    """The tables of a Markdown document by heading, read by an independent parser."""
    tables: dict[str, list[list[str]]] = {}
    tokens = markdown_it.MarkdownIt("commonmark").enable("table").parse(text)
    heading = ""
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            heading = inline.content
        elif opening.type == "tr_open":
            tables.setdefault(heading, []).append([])
        if opening.type in ("td_open", "th_open"):
            shown = "".join(child.content for child in inline.children or ())
            tables[heading][-1].append(shown)
    return tables


def test_report_json_reads_back_as_it_was_handed_over(tmp_path, report, extras):
    write_report(tmp_path, report, extras)
    assert _read_json(tmp_path) == report


def test_report_json_has_the_run_first_and_unknown_parts_last(tmp_path, report):
    write_report(tmp_path, {"zebra": 1, "apple": 2, **report}, {})
    keys = list(_read_json(tmp_path))
    assert keys[:3] == ["run", "target", "method"]
    assert keys[-2:] == ["apple", "zebra"]


def test_numbers_that_are_not_finite_become_null(tmp_path, report, extras):
    report["train"]["final_loss"] = float("nan")
    report["check"]["native"]["speedup"] = np.float32("inf")
    report["heads"][1]["top1"] = float("-inf")
    extras["losses"][3]["loss"] = extras["losses"][3]["head_losses"][0] = float("nan")
    extras["tree"]["node_shares"][-1] = float("nan")
    write_report(tmp_path, report, extras)
    written = _read_json(tmp_path)
    assert (
        written["train"]["final_loss"]
        is written["check"]["native"]["speedup"]
        is written["heads"][1]["top1"]
        is None
    )
    stages = {row[0]: row for row in _cells((tmp_path / "report.md").read_text())["Stages"]}
    assert stages["train"][-1] == "600,246 tokens, 12,000 tokens/s"


def test_numpy_paths_enums_and_tuples_are_written_as_plain_json(tmp_path):
    Reason = StrEnum("Reason", {"EMPTY": "empty"})
    report = {
        "target": Path("models/chat"),
        "seeds": {"rows": np.int64(7)},
        "check": {
            "passed": np.bool_(True),
            "native": {"acceleration_rate": np.float64(1.5), "accepted_lengths": (1, 2)},
        },
        "quarantine": {"seeds": {Reason.EMPTY: np.int32(3)}},
        "heads": [{"top1": np.array(0.5)}],
    }
    write_report(tmp_path, report, {})
    assert _read_json(tmp_path) == {
        "target": "models/chat",
        "seeds": {"rows": 7},
        "check": {"passed": True, "native": {"acceleration_rate": 1.5, "accepted_lengths": [1, 2]}},
        "quarantine": {"seeds": {"empty": 3}},
        "heads": [{"top1": 0.5}],
    }


def test_half_a_surrogate_pair_in_a_text_loses_no_report(tmp_path, report, extras):
    report["target"] = "chat-\udc80"
    extras["samples"][0]["tokens"][0]["text"] = "\ud83d"
    write_report(tmp_path, report, extras)
    assert _read_json(tmp_path)["target"] == "chat-\udc80"


def test_markdown_has_the_numbers_of_the_report(tmp_path, report, extras):
    write_report(tmp_path, report, extras)
    tables = _cells((tmp_path / "report.md").read_text(encoding="utf-8"))
    headline = {row[0]: row[1] for row in tables["Headline"]}
    assert headline == {
        "figure": "value",
        "Acceleration rate": "1.99",
        "Overhead": "1.23x",
        "Speedup": "1.61x",
        "Greedy identical": "31/32",
        "vLLM acceleration rate": "1.71",
        "Target's own text": "0.93",
        "Tokens/s, plain": "256",
        "Tokens/s, with heads": "412",
    }
    assert tables["Heads"][1] == ["0", "t+2", "62.0%", "74.0%", "80.0%", "82.0%", "84.0%"]
    stages = {row[0]: row[1:] for row in tables["Stages"]}
    assert stages["target"] == ["-", "-", "1 min 20 s", ""]
    assert stages["seeds"] == ["1,200", "17", "1.2 s", ""]
    assert stages["generate"] == [
        "1,180",
        "20",
        "1 min 01 s",
        "345,678 tokens, 2,410 tokens/s per busy worker",
    ]
    assert stages["train"][2:] == ["2 h 01 min", "600,246 tokens, 12,000 tokens/s, loss 4.21"]
    assert stages["check"] == ["32", "-", "250 ms", "2 prompts skipped"]
    assert stages["push"][0] == "not run"
    assert tables["Quarantine"][1:] == [
        ["generate", "degenerate-loop", "20"],
        ["seeds", "duplicate", "12"],
        ["seeds", "empty", "5"],
    ]
    check = {row[0]: row[1:] for row in tables["Check"]}
    assert check["time to first token"] == ["34 ms", "-"]
    assert check["accepted per position"] == ["-", "50.0% 21.3%"]
    assert check["greedy identical"] == ["31/32", "32/32"]
    assert tables["Categories"][1] == ["math", "10", "2.50", "250", "510", "2.04x"]
    assert dict(tables["Drift"][1:])["perplexity, change"] == "+1.2%"
    assert tables["Study: trees"][1:] == [
        ["plain", "0", "1.90", "1.20x", "1.58x"],
        ["top-1 chain", "4", "1.90", "1.20x", "1.58x"],
    ]
    assert tables["Study: typical acceptance"][3] == [
        "0.7",
        "typical",
        "0.04",
        "1.90",
        "1.58x",
        "-1.21",
    ]
    assert tables["Study: heads used"][2] == ["2", "5", "1.90", "1.20x", "1.58x"]
    assert tables["Study: batch size"][1] == ["2", "507", "812", "1.60x"]


def test_drift_says_from_which_copy_it_is(tmp_path, report, extras):
    note = (
        "The tuned target against the original{}, at the target-written positions of held-out rows."
    )
    write_report(tmp_path, report, extras)
    assert note.format("") in (tmp_path / "report.md").read_text(encoding="utf-8")
    report["train"]["quantization"] = "4bit"
    write_report(tmp_path, report, extras)
    assert note.format(" in 4bit, in which it was trained") in (tmp_path / "report.md").read_text(
        encoding="utf-8"
    )


def test_tree_depths_add_up_to_the_expected_acceleration_rate(tmp_path, report, extras):
    report["tree"] |= {"expected_acceleration_rate": 2.098, "expected_standard_error": 0.131}
    write_report(tmp_path, report, extras)
    rows = _cells((tmp_path / "report.md").read_text(encoding="utf-8"))["Tree"][1:]
    assert [row[:3] for row in rows] == [
        ["0", "the target's own token", "-"],
        ["1", "2", "2"],
        ["2", "3", "2"],
    ]
    assert sum(float(row[3]) for row in rows) == pytest.approx(
        1 + sum(extras["tree"]["node_shares"]), abs=0.01
    )
    assert sum(float(row[3]) for row in rows) == pytest.approx(2.098, abs=0.01)
    assert "expected acceleration rate 2.10 ± 0.13" in (tmp_path / "report.md").read_text()


def test_markdown_shows_hostile_names_as_text(tmp_path, report):
    name = "a|b <script>alert(1)</script> **c** `d` [e](f)\n# g"
    report["target"] = name
    write_report(tmp_path, report, {})
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    shown = dict(row for row in _cells(text)["Provenance"] if len(row) == 2)["target"]
    assert shown == " ".join(name.split())
    rendered = markdown_it.MarkdownIt("commonmark").enable("table").render(text)
    assert not re.search(r"<script|<code>|<a |<strong>c", rendered)


def test_a_failed_check_says_why(tmp_path, report):
    report["check"] |= {"passed": False, "failures": ["vLLM accepted nothing.", "Row 3 differs."]}
    write_report(tmp_path, report, {})
    for name in ("report.md", "report.html"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert (
            "heck failed" in text and "vLLM accepted nothing." in text and "Row 3 differs." in text
        )


@pytest.mark.parametrize(
    "missing",
    ["run", "target", "seeds", "heads", "tree", "check", "quarantine", "seconds_by_stage"],
)
def test_any_part_may_be_missing(tmp_path, report, extras, missing):
    del report[missing]
    write_report(tmp_path, report, extras)
    report[missing] = None
    write_report(tmp_path, report, extras)
    assert _read_json(tmp_path) == report


def test_an_empty_report_says_not_run(tmp_path):
    write_report(tmp_path, {}, {})
    tables = _cells((tmp_path / "report.md").read_text())
    assert {row[1] for row in tables["Headline"][1:]} == {"not run"}
    assert "not run" in (tmp_path / "report.html").read_text()


def test_nothing_quarantined_differs_from_not_run(tmp_path, report):
    report["quarantine"] = {"seeds": {}, "generate": {"empty": 0}}
    write_report(tmp_path, report, {})
    assert "Nothing quarantined." in (tmp_path / "report.md").read_text()


def test_a_report_that_cannot_be_made_leaves_the_old_one(tmp_path, report, extras):
    write_report(tmp_path, report, extras)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    extras["tree"]["node_shares"].pop()  # not one per node: a mistake of ours
    with pytest.raises(ValueError):
        write_report(tmp_path, report, extras)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
