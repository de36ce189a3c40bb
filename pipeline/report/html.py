"""report.html: the whole run in one self-contained page, for desktop and phone, light and dark
scheme.

Styles and plots are inside the file; it loads nothing and runs no script (the page's security
policy forbids both). The template engine escapes all text; only our own drawings and the style
sheet are passed as markup.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pipeline.formatting import count, rate, ratio, times
from pipeline.report import plots, speed_plots
from pipeline.report.facts import check_outcome, headline, pick, subtitle, title
from pipeline.report.tables import tables
from pipeline.report.warnings import warnings

_HERE = Path(__file__).parent
_NUM_HUES = 5  # of the coloured answer; adjacent steps differ


def page(report: dict, extras: dict) -> str:
    """The whole report.html; the same report gives the same bytes."""
    return _template().render(
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


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


def drawings(report: dict, extras: dict) -> dict[str, str]:
    """The plots for which there is data, by name."""
    native, heads, sizes = (
        pick(report, "check", "native"),
        pick(report, "heads") or (),
        pick(report, "tree", "sizes"),
    )
    choices, shares = pick(extras, "tree", "choices"), pick(extras, "tree", "node_shares") or ()
    losses, held_out = pick(extras, "losses") or (), pick(extras, "held_out") or ()
    evaluated = [row for row in held_out if row.get("head_top1")]
    lengths = pick(native, "accepted_lengths")
    typical, used, batch = (pick(native, "studies", name) for name in ("typical", "heads", "batch"))
    load = pick(report, "check", "vllm", "studies", "load")
    wanted: dict[str, tuple[Any, Callable[[], str]]] = {  # whether there is data, and what draws it
        "heads": (
            any(head.get("top1") is not None for head in heads),
            lambda: plots.head_accuracy(heads),
        ),
        "tree": (
            choices and not pick(report, "tree", "dynamic"),
            lambda: plots.tree(choices, shares),
        ),
        "sizes": (sizes, lambda: speed_plots.tree_sizes(sizes, pick(report, "tree", "nodes"))),
        "losses": (losses, lambda: plots.losses(losses, held_out)),
        "accuracy": (evaluated, lambda: plots.held_out_accuracy(evaluated)),
        "drift": (
            any(row.get("backbone_loss") is not None for row in losses),
            lambda: plots.drift(losses, held_out),
        ),
        "accepted": (lengths, lambda: speed_plots.accepted_lengths(lengths)),
        "study_typical": (
            typical,
            lambda: speed_plots.typical(typical, "acceleration_rate", "tokens per step"),
        ),
        "study_typical_likelihood": (
            typical,
            lambda: speed_plots.typical(typical, "log_likelihood", "log-likelihood"),
        ),
        "study_heads": (len(used or ()) > 1, lambda: speed_plots.heads_used(used)),
        "study_batch": (batch, lambda: speed_plots.batch_sizes(batch)),
        "study_load": (load, lambda: speed_plots.load(load)),
    }
    return {name: draw() for name, (known, draw) in wanted.items() if known}


def speedup_bars(report: dict) -> dict[str, dict[str, Any]]:
    """Speedups as bars: each row's name, text and share of the largest, and the place of plain
    decoding.
    """
    native = pick(report, "check", "native")
    tabled = {
        "categories": (pick(native, "categories"), "category"),
        "study_trees": (pick(native, "studies", "trees"), "tree"),
    }
    found = {}
    for name, (rows, key) in tabled.items():
        known = [
            (str(row.get(key)), row["speedup"])
            for row in rows or []
            if row.get("speedup") is not None
        ]
        largest = max([1.0, *(speedup for _, speedup in known)])
        bars = [
            (label, times(speedup), speedup / largest, speedup <= 1) for label, speedup in known
        ]
        if bars:
            found[name] = {"plain": 1 / largest, "bars": bars}
    return found


def pace_bars(report: dict) -> list[tuple[str, str, float]]:
    """Tokens per second of plain decoding and with heads: name, text, and share of the faster
    one.
    """
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
    caption = (
        f"{count(len(tokens))} tokens in {count(len(steps))} steps:"
        f" {ratio(len(tokens) / len(steps))} a step"
    )
    return {"prompt": str(sample.get("prompt", "")), "steps": steps, "caption": caption}
