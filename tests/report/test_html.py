"""report.html: one file, nothing loaded, nothing run, every text escaped."""

from __future__ import annotations

from html.parser import HTMLParser
from itertools import pairwise

import pytest

from pipeline.report.html import drawings, page

VOID = {"meta", "br", "img", "link", "input", "hr"}
LOADING = {"src", "href", "xlink:href", "srcset", "action", "data", "poster"}


class Reader(HTMLParser):
    """Reads a page: its tags, attributes and text by tag; fails on a tag that is not closed in its
    turn.
    """

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


def test_page_is_well_formed_and_has_every_part(report, extras):
    sizes = [{"nodes": nodes, "overhead": 1.2, "expected_speedup": 1.5} for nodes in (1, 4, 16)]
    report["tree"]["sizes"] = sizes
    seen = Reader(page(report, extras))
    assert seen.tags.count("svg") == len(drawings(report, extras)) == 10
    for text in (
        "1.99",
        "1.23x",
        "1.61x",
        "31/32",
        "1.71",
        "256",
        "412",
        "62.0%",
        "degenerate-loop",
        "多个词元",
    ):
        assert text in seen.text


def test_page_loads_nothing_and_runs_nothing(report, extras):
    text = page(report, extras)
    seen = Reader(text)
    assert not {"script", "link", "iframe", "img", "object", "embed", "base", "form"} & set(
        seen.tags
    )
    loads = [value for name, value in seen.attributes if name in LOADING]
    assert all(value.startswith("#") for value in loads)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert "http:" not in text and "https:" not in text and "@import" not in text
    assert "default-src 'none'" in text


def test_every_reference_inside_the_page_has_one_target(report, extras):
    seen = Reader(page(report, extras))
    ids = [value for name, value in seen.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for name, value in seen.attributes if name == "xlink:href"} <= set(ids)


def test_texts_from_data_are_escaped(report, extras):
    attack = "\"><script>alert(1)</script><img src=x onerror=alert(1)>'{{ 7*7 }}"
    report["target"] = report["method"] = report["hardware"] = attack
    report["run"] = {"name": attack, "date": attack, "fingerprints": {attack: attack}}
    report["check"]["failures"] = [attack]
    report["quarantine"] = {attack: {attack: 3}}
    report["seconds_by_stage"][attack] = 1.0
    report["check"][attack] = {"speedup": attack}
    report["heads"][0]["top1"] = None
    report["check"]["native"]["categories"][0]["category"] = attack
    report["check"]["native"]["studies"]["trees"][0]["tree"] = attack
    extras["samples"][0] = {"prompt": attack, "tokens": [{"text": attack, "step": attack}]}
    seen = Reader(page(report, extras))
    assert not {"script", "img"} & set(seen.tags)
    assert not [name for name, _ in seen.attributes if name.startswith("on")]
    assert seen.text.count(attack) >= 10


@pytest.mark.usefixtures("unrendered_plots")
def test_tokens_of_one_step_share_a_colour_and_neighbouring_steps_do_not(report, extras):
    extras["samples"][0]["tokens"] = [
        {"text": f"<{i}>", "step": step} for i, step in enumerate([0, 1, 1, 1, 2, 3, 3])
    ]
    text = page(report, extras)
    answer = text[text.index('<p class="answer">') :]
    answer = answer[: answer.index("</p>")]
    spans = [span.split(">", 1) for span in answer.split("<span ")[1:]]
    assert [body.removesuffix("</span>") for _, body in spans] == [
        "&lt;0&gt;", "&lt;1&gt;&lt;2&gt;&lt;3&gt;", "&lt;4&gt;", "&lt;5&gt;&lt;6&gt;",
    ]  # fmt: skip
    hues = [attributes.split('"')[1] for attributes, _ in spans]
    assert all(a != b for a, b in pairwise(hues))
    assert "7 tokens in 4 steps: 1.75 a step" in text


def test_bars_are_drawn_to_the_scale_of_the_largest_speedup_and_plain_decoding_has_its_mark(report):
    report["check"]["native"] = {
        "categories": [{"category": name, "speedup": s} for name, s in (("a", 2.5), ("b", 0.5))]
    }
    text = page(report, {})
    assert 'style="width:100.0%"' in text and '<i class="slower" style="width:20.0%"' in text
    assert text.count('<u style="left:40.0%">') == 2


@pytest.mark.slow
def test_the_same_report_gives_the_same_bytes(report, extras):
    assert page(report, extras) == page(report, extras)


def test_both_colour_schemes_define_every_colour_that_the_page_uses(report, extras):
    text = page(report, extras)
    used = {part.split(")")[0] for part in text.split("var(--")[1:]}
    style = text[text.index("<style>") : text.index("</style>")]
    light, dark = style.split("prefers-color-scheme: dark")
    assert used and all(f"--{name}:" in light and f"--{name}:" in dark for name in used)


def test_drawings_are_of_what_there_is(report, extras):
    assert drawings({}, {}) == {}
    del extras["losses"], report["heads"]
    del report["check"]["native"]["studies"], extras["held_out"]
    assert set(drawings(report, extras)) == {"tree", "accepted"}


@pytest.mark.usefixtures("unrendered_plots")
@pytest.mark.parametrize("part", ["tree", "losses", "held_out", "samples"])
def test_any_extra_may_be_missing(report, extras, part):
    del extras[part]
    Reader(page(report, extras))
    Reader(page(report, {part: []}))
