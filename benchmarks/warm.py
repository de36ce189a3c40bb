"""Compiles what every report and card is rendered with, where it is imported: `benchmarks.ground` forks from there."""

from pipeline.export.card import model_card
from pipeline.heads.shape import KINDS, head_kind
from pipeline.report.documents import report_texts

report_texts({}, {})
for kind in KINDS:
    model_card({}, kind=head_kind(kind), base_model=None, repo_id=None, recipe={})
