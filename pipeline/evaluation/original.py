"""Compare a tuned backbone with the original target: its drift.

Drift is measured on the exported weights, that is, after the adapter was merged and the weights
were rounded. Both models read the same held-out rows, one model after the other. The original's
log-probabilities at up to `MAX_POSITIONS` positions are kept in memory until then.

Letters: T answer tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from pipeline.artifacts.check_result import TunedDrift
from pipeline.artifacts.drawn_rows import draw_rows
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.conversations.fair_draw import id_hash
from pipeline.evaluation.answers import log_probabilities
from pipeline.evaluation.prompts import Prompt
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.targets.loading import load_on_gpus
from pipeline.targets.spec import TargetSpec
from pipeline.training.backbone_losses import Drift

Answers = list[tuple[Prompt, list[int]]]  # each prompt, and the token ids of its answer

MAX_POSITIONS = 2048  # gives a KL of 0.01 to about 10 %; takes 1 GB at V = 128k
NUM_CONVERSATIONS = 64


@torch.inference_mode()
def published_drift(
    original: TargetSpec,
    published: TargetSpec,
    text: Answers,
    gpus: int = 0,
    progress: ProgressReporter = SILENT,
) -> TunedDrift:
    """Measure the published model's drift from the original on answers and their prompts."""
    prompts = [prompt for prompt, _ in text]
    answers = [answer for _, answer in text]
    progress.begin("drift of the tuned model", 0)
    model = load_on_gpus(original, gpus)
    expected = [log_p_TV.cpu() for log_p_TV in log_probabilities(model, prompts, answers)]
    del model
    model = load_on_gpus(published, gpus)
    drift = Drift.zero(torch.device("cpu"))
    found = log_probabilities(model, prompts, answers)
    for log_p_TV, log_q_TV, answer in zip(expected, found, answers, strict=True):
        drift.add(log_p_TV, log_q_TV.cpu(), torch.tensor(answer))
    return drift.figures()


def drift_answers(rows: Iterable[TokenRow], room: int) -> Answers:
    """Draw the text that drift is measured on: parts of the calibrate split's answers.

    The answers come from up to `NUM_CONVERSATIONS` rows, see `draw_rows`. They have at most
    `MAX_POSITIONS` tokens in total: of longer ones only a part is taken, equally long in each
    answer, at a place that a hash chooses.
    """
    spans = []
    for row in draw_rows(rows, NUM_CONVERSATIONS, room, "calibrate").rows:
        spans += [(row, span) for span in row.spans]
    spans.sort(key=lambda pair: len(pair[1]))
    left = MAX_POSITIONS
    answers = []
    for number, (row, span) in enumerate(spans):
        length = min(len(span), left // (len(spans) - number))
        left -= length
        start = span.start + id_hash(f"{row.id}/{span.start}") % (len(span) - length + 1)
        ids = row.input_ids[: start + length].tolist()
        if length:
            answers.append((Prompt(row.id, ids[:start]), ids[start:]))
    return answers
