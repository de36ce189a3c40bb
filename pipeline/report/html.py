"""report.html: the whole run in one self-contained page, for desktop and phone, light and dark scheme.

Styles and plots are inside the file; it loads nothing and runs no script (the page's security policy forbids both).
The template engine escapes all text; only our own drawings and the style sheet are passed as markup.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipeline.report import plots, speed_plots
from pipeline.report.facts import check_outcome, headline, pick, subtitle, title, warnings
from pipeline.report.formatting import count, rate, ratio, times
from pipeline.report.tables import tables

_HERE = Path(__file__).parent
_NUM_HUES = 5  # of the coloured answer; adjacent steps differ


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
        outcome=check_outcome(report),
        warnings=warnings(report),
        figures=headline(report),
        pace=pace_bars(report),
        speedups=speedup_bars(report),
        tables=tables(report, extras),
        plots={name: Markup(drawing) for name, drawing in drawings(report, extras).items()},
        samples=[sample for each in pick(extras, "samples") or [] if (sample := _coloured(each))],
        css=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
    )


def drawings(report: dict, extras: dict) -> dict[str, str]:
    """The plots for which there is data, by name."""
    heads, losses = pick(report, "heads"), pick(extras, "losses")
    choices, lengths = pick(extras, "tree", "choices"), pick(report, "check", "native", "accepted_lengths")
    drawn: dict[str, str] = {}
    if heads and any(head.get("top1") is not None for head in heads):
        drawn["heads"] = plots.head_accuracy(heads)
    if choices:
        drawn["tree"] = plots.tree(choices, pick(extras, "tree", "probabilities") or ())
    if sizes := pick(report, "tree", "sizes"):
        drawn["sizes"] = speed_plots.tree_sizes(sizes, pick(report, "tree", "nodes"))
    if losses:
        drawn["losses"] = plots.losses(losses, pick(extras, "held_out") or ())
    if evaluated := [row for row in pick(extras, "held_out") or () if row.get("head_top1")]:
        drawn["accuracy"] = plots.held_out_accuracy(evaluated)
    if losses and any(row.get("backbone_loss") is not None for row in losses):
        drawn["drift"] = plots.drift(losses, pick(extras, "held_out") or ())
    if lengths:
        drawn["accepted"] = speed_plots.accepted_lengths(lengths)
    return drawn | _study_drawings(pick(report, "check", "native", "studies") or {})


def _study_drawings(studies: dict) -> dict[str, str]:
    drawn: dict[str, str] = {}
    if rows := studies.get("typical"):
        drawn["study_typical"] = speed_plots.typical(rows, "acceleration_rate", "tokens per step")
        drawn["study_typical_likelihood"] = speed_plots.typical(rows, "log_likelihood", "log-likelihood")
    if len(rows := studies.get("heads") or ()) > 1:
        drawn["study_heads"] = speed_plots.heads_used(rows)
    if rows := studies.get("batch"):
        drawn["study_batch"] = speed_plots.batch_sizes(rows)
    return drawn


def speedup_bars(report: dict) -> dict[str, dict[str, Any]]:
    """Speedups as bars: each row's name, text and share of the largest, and the place of plain decoding."""
    native = pick(report, "check", "native")
    tabled = {
        "categories": (pick(native, "categories"), "category"),
        "study_trees": (pick(native, "studies", "trees"), "tree"),
    }
    found = {}
    for name, (rows, key) in tabled.items():
        known = [(str(row.get(key)), row["speedup"]) for row in rows or [] if row.get("speedup") is not None]
        largest = max([1.0, *(speedup for _, speedup in known)])
        bars = [(label, times(speedup), speedup / largest, speedup <= 1) for label, speedup in known]
        if bars:
            found[name] = {"plain": 1 / largest, "bars": bars}
    return found


def pace_bars(report: dict) -> list[tuple[str, str, float]]:
    """Tokens per second of plain decoding and with heads: name, text, and share of the faster one."""
    keys = {"plain": "baseline_tokens_per_second", "heads": "tokens_per_second"}
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
