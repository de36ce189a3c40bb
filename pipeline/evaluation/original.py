"""Compare a tuned backbone with the original target: drift, and the original's answers.

Drift is measured on the exported weights, that is, after the adapter was merged and the weights
were rounded. Both models read the same held-out rows, one model after the other. The original's
log-probabilities at up to `MAX_POSITIONS` positions are kept in memory until then.

Letters: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch

from pipeline.artifacts.check_result import TunedDrift
from pipeline.artifacts.drawn_rows import draw_rows
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.config import CheckConfig
from pipeline.conversations.conversation import Conversation, RowRejected
from pipeline.conversations.fair_draw import id_hash
from pipeline.evaluation.answer_files import Line
from pipeline.evaluation.answer_states import Answers
from pipeline.evaluation.answers import log_probabilities, model_answer
from pipeline.evaluation.prompts import Prompt, ask_questions, question_ids
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.targets.loading import load_on_gpus
from pipeline.targets.spec import TargetSpec, load_tokenizer
from pipeline.training.backbone_losses import Drift

MAX_POSITIONS = 2048  # gives a KL of 0.01 to about 10 %; takes 1 GB at V = 128k
NUM_CONVERSATIONS = 64
ORIGINAL = "original"


def compare_with_original(
    original: TargetSpec,
    published: TargetSpec,
    answers: Answers,
    questions: Sequence[Conversation],
    settings: CheckConfig,
    gpus: int,
    name: str,
    progress: ProgressReporter = SILENT,
) -> tuple[TunedDrift, list[Line]]:
    """Measure the exported backbone's drift, and let the original answer the check's questions.

    Args:
        original, published: The model before it was tuned, and the exported one, both with a
            context that the questions fit into.
        answers: Held-out text to measure the drift on, see `drift_answers`.
        questions: The check's questions, which the original answers; may be empty.
        gpus: The number of GPUs that each model spans; 0 is the CPU.
        name: The target's name in files of answers.

    Returns:
        The drift, and the original's answers in FastChat's schema. Questions without a usable
            answer are left out.
    """
    drift = published_drift(original, published, answers, gpus)
    tokenizer = load_tokenizer(original)
    lines = []
    dialogues = ask_questions(original, questions, settings, "transformers", gpus, progress)
    for question, dialogue in zip(question_ids(questions), dialogues, strict=True):
        texts = []
        with contextlib.suppress(RowRejected):  # it has no answer
            for row in dialogue.rows():
                for span in row.spans:
                    ids = row.input_ids[span.start : span.end]
                    texts.append(tokenizer.decode(ids, skip_special_tokens=True).strip())
            lines.append(model_answer(question, f"{name}-{ORIGINAL}", texts))
    return drift, lines


@torch.inference_mode()
def published_drift(
    original: TargetSpec, published: TargetSpec, text: Answers, gpus: int = 0
) -> TunedDrift:
    """Measure the published model's drift from the original on answers and their prompts."""
    prompts = [prompt for prompt, _ in text]
    answers = [answer for _, answer in text]
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

    The answers are those of up to `NUM_CONVERSATIONS` rows, see `draw_rows`. They have at most
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
