"""Compiles what every report and card is rendered with, where it is imported: `benchmarks.ground` forks from there."""

from pipeline.config.load import validate
from pipeline.export.card import model_card
from pipeline.export.card_facts import Published
from pipeline.heads.shape import KINDS
from pipeline.report.documents import report_texts

report_texts({}, {})
for kind in KINDS:
    sections = {
        "run": {"name": "warm"},
        "target": {"model": "owner/name"},
        "seeds": {"sources": [{"hub": "owner/name"}]},
    }
    model_card(Published({}, validate({**sections, "train": {"heads": kind}}, "warm")))
