"""report.json, report.md, report.html and the terminal: each has the report's figures, safely."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from itertools import pairwise

import markdown_it
import pytest

from pipeline.artifacts.json_form import from_json
from pipeline.report.report import Report
from tests.report.conftest import EXTRAS, REPORT, html, printed, texts, typed

VOID = {"meta", "br", "img", "link", "input", "hr"}
LOADING = {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}


def cells_of(text: str) -> dict[str, list[list[str]]]:
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


class Reader(HTMLParser):
    """The tags, attributes and text of a page; fails on a tag that is not closed in its turn."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.text += data


# --- report.json and report.md


def test_report_json_reads_back_and_begins_with_the_run(report, extras):
    written = json.loads(texts(report, extras)["report.json"])
    assert from_json(Report, written) == typed(report)
    assert list(written)[:3] == ["run", "target", "method"]


def test_markdown_has_the_numbers_of_the_report(report, extras):
    tables = cells_of(texts(report, extras)["report.md"])
    assert tables["Check"] == [
        ["", "native", "vLLM"],
        ["acceleration rate", "1.99", "1.71"],
        ["expected", "2.10", "-"],
        ["speedup", "1.61x", "-"],
        ["overhead", "1.23x", "-"],
        ["tokens/s, with heads", "412", "-"],
        ["tokens/s, plain", "256", "-"],
        ["greedy identical", "31/32", "32/32"],
        ["greedy ties", "1 of 2,048 tokens within 0.12", "0 of 2,048 tokens"],
        ["prompts", "32", "-"],
        ["prompts skipped", "2", "-"],
        ["steps that keep 1, 2, … drafted tokens", "-", "50.0% 21.3%"],
    ]
    assert tables["Heads"][1] == ["0", "t+2", "62.0%", "74.0%", "80.0%", "82.0%", "84.0%"]
    stages = {row[0]: row[1:] for row in tables["Stages"]}
    assert stages["target"] == ["-", "-", "1 min 20 s", ""]
    made = "345,678 tokens, 2,410 tokens/s"
    assert stages["generate"] == ["1,180", "20", "1 min 01 s", made]
    assert stages["train"][2:] == ["2 h 01 min", "600,246 positions, 12,000 positions/s, loss 4.21"]
    assert stages["push"][0] == "not run"
    assert ["generate", "degenerate-loop", "20"] in tables["Quarantine"]
    assert tables["Categories"][1] == ["heads", "2.50 (1.60x)", "1.10 (1.60x)"]
    assert dict(tables["Drift"][1:])["perplexity, change"] == "+1.2%"


def test_markdown_shows_hostile_names_as_text(report):
    name = "a|b <script>alert(1)</script> **c** `d` [e](f)\n# g"
    text = texts(report | {"target": name}, {})["report.md"]
    shown = dict(row for row in cells_of(text)["Provenance"] if len(row) == 2)["target"]
    assert shown == " ".join(name.split())
    rendered = markdown_it.MarkdownIt("commonmark").enable("table").render(text)
    assert not re.search(r"<script|<code>|<a |<strong>c", rendered)


@pytest.mark.parametrize("gone", [*REPORT, *EXTRAS])
def test_any_part_may_be_missing(report, extras, gone):
    report.pop(gone, None)
    extras.pop(gone, None)
    Reader(texts(report, extras)["report.html"])
    assert printed(report, width=80)


def test_what_has_not_run_is_called_so():
    found = texts({}, {})
    assert "## Check\n\nNot run." in found["report.md"] and "not run" in found["report.html"]
    assert "Check not run" in printed({}) and "my-run/report.html" in printed({})


def test_every_form_states_what_a_check_found(report, extras):
    slow = {"tokens_per_second": 62.0, "baseline_tokens_per_second": 100.0, "speedup": 0.62}
    report["check"]["native"] |= slow | {"range": [60, 64], "baseline_range": [100, 100]}
    found = texts(report, extras)
    for text in (found["report.md"], found["report.html"], printed(report, width=100)):
        assert "Check passed: greedy text as without heads, except 1 of 64" in text
        assert "0.62x natively (0.60 to 0.64): slower with heads" in text
    report["check"] |= {"passed": False, "failures": ["Row 3 differs."]}
    found = texts(report, extras)
    for text in (found["report.md"], found["report.html"], printed(report, width=100)):
        assert "heck failed" in text and "Row 3 differs." in text


# --- report.html


def test_page_is_whole_and_loads_and_runs_nothing(report, extras):
    text = html(report, extras)
    seen = Reader(text)
    figures = ("1.99", "1.23x", "1.61x", "31/32", "1.71", "256", "412", "62.0%", "多个词元")
    assert all(figure in seen.text for figure in figures)
    forbidden = {"script", "link", "iframe", "img", "object", "embed", "base", "form"}
    assert not forbidden & set(seen.tags)
    loads = [value for name, value in seen.attributes if name in LOADING]
    assert all(value.startswith("#") for value in loads)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert "default-src 'none'" in text
    ids = [value for name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for name, value in seen.attributes if name == "xlink:href"} <= set(ids)
    used = {part.split(")")[0] for part in text.split("var(--")[1:]}
    style = text[text.index("<style>") : text.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark")
    assert used and all(f"--{name}:" in light and f"--{name}:" in dark for name in used)
    assert html(report, extras) == text


def test_texts_from_data_are_escaped(report, extras):
    attack = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'{{ 7*7 }}"
    report["target"] = report["method"] = attack
    report["hardware"] = {attack: attack}
    report["run"] = {"name": attack, "date": attack, "fingerprints": {attack: attack}}
    report["check"] |= {"passed": False, "failures": [attack]}
    report["quarantine"] = {attack: {attack: 3}}
    report["seconds_by_stage"][attack] = 1.0
    native = report["check"]["native"]
    native["categories"][0]["category"] = attack
    native["baselines"] = [{"name": "x", "failed": attack}]
    extras["samples"][0] = {"prompt": attack, "tokens": [{"text": attack, "step": 0}]}
    seen = Reader(html(report, extras))
    assert not {"script", "img"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert seen.text.count(attack) >= 10


def test_a_step_has_one_colour_and_its_neighbours_others(report, extras):
    steps = enumerate([0, 1, 1, 1, 2, 3, 3])
    extras["samples"][0]["tokens"] = [{"text": f"<{i}>", "step": step} for i, step in steps]
    text = html(report, extras)
    spans = re.findall(r'<span class="(h\d)"[^>]*>(.*?)</span>', text)
    together = ["&lt;0&gt;", "&lt;1&gt;&lt;2&gt;&lt;3&gt;", "&lt;4&gt;", "&lt;5&gt;&lt;6&gt;"]
    assert [body for _, body in spans] == together
    assert all(a != b for (a, _), (b, _) in pairwise(spans))
    assert "7 tokens in 4 steps: 1.75 a step" in text


# --- terminal


@pytest.mark.parametrize("width", [60, 240])
def test_output_is_plain_and_fits_off_a_terminal(report, extras, width):
    report["target"] = "/some/where/" + "very-long-name-" * 20
    report["check"] |= {"passed": False, "failures": ["A sentence. " * 30]}
    lines = printed(report, width=width).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    assert "\x1b" not in "".join(lines)
    assert "\x1b[" in printed(report, force_terminal=True, color_system="standard")


def test_no_text_is_taken_for_markup_or_a_control_sequence(report, extras):
    report["target"] = "[red]x[/red] [link=a]\x1b[31mred\x07"
    report["quarantine"] = {"[bold]": {"[/nope]": 3}}
    text = printed(report, width=100)
    assert all(part in text for part in ("[red]x[/red] [link=a]", "[bold]", "[/nope]"))
    assert "\x1b" not in text and "\x07" not in text
