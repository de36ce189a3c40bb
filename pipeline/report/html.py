"""report.html: one file that shows the whole run, on a desktop or a phone, in the light or the dark.

Self-contained: styles and plots are in the file, nothing is loaded and no script runs (the page's own security policy
forbids both). Every text is escaped by the template engine; the only markup that it is handed are our own drawings and
the style sheet.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipeline.report import plots, tree_plot
from pipeline.report.facts import headline, pick, subtitle, title, verdict
from pipeline.report.tables import tables
from pipeline.report.wording import count, rate, ratio

_HERE = Path(__file__).parent
_NUM_HUES = 5  # of the coloured answer; neighbouring steps never share one


def page(report: dict, extras: dict) -> str:
    """The whole report.html; the same report gives the same bytes."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        title=title(report),
        subtitle=subtitle(report),
        verdict=verdict(report),
        figures=headline(report),
        race=race(report),
        tables=tables(report, extras),
        plots={name: Markup(drawing) for name, drawing in drawings(report, extras).items()},
        samples=[sample for each in pick(extras, "samples") or [] if (sample := _coloured(each))],
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
    )


def drawings(report: dict, extras: dict) -> dict[str, str]:
    """The plots that there is data for, by name."""
    heads, losses = pick(report, "heads"), pick(extras, "losses")
    choices, lengths = pick(extras, "tree", "choices"), pick(report, "check", "native", "accepted_lengths")
    drawn: dict[str, str] = {}
    if heads and any(head.get("top1") is not None for head in heads):
        drawn["heads"] = plots.head_accuracy(heads)
    if choices:
        drawn["tree"] = tree_plot.tree(choices, pick(extras, "tree", "probabilities") or ())
    if losses:
        drawn["losses"] = plots.losses(losses, pick(extras, "held_out") or ())
    if lengths:
        drawn["accepted"] = plots.accepted_lengths(lengths)
    return drawn


def race(report: dict) -> list[tuple[str, str, float]]:
    """Plain decoding and Medusa side by side: name, tokens per second, and its share of the faster one's."""
    keys = {"plain": "baseline_tokens_per_second", "Medusa": "tokens_per_second"}
    speeds = {name: pick(report, "check", "native", key) for name, key in keys.items()}
    if not all(speeds.values()):
        return []
    return [(name, rate(speed), speed / max(speeds.values())) for name, speed in speeds.items()]


def _coloured(sample: dict) -> dict[str, Any] | None:
    tokens = sample.get("tokens") or []
    steps = []
    for i, (step, group) in enumerate(groupby(tokens, key=lambda token: token.get("step"))):
        texts = [str(token.get("text", "")) for token in group]
        words = f"step {step}: {len(texts)} token{'s' * (len(texts) > 1)}"
        steps.append({"text": "".join(texts), "hue": i % _NUM_HUES, "title": words})
    if not steps:
        return None
    caption = f"{count(len(tokens))} tokens in {count(len(steps))} steps: {ratio(len(tokens) / len(steps))} a step"
    return {"prompt": str(sample.get("prompt", "")), "steps": steps, "caption": caption}
