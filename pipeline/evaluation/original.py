"""Compare a tuned backbone with the original target: drift, and the original's answers.

Drift is measured on the exported weights, that is, after the adapter was merged and the weights
were rounded. Both models read the same held-out rows, one model after the other. The original's
log-probabilities at up to `MAX_POSITIONS` positions are kept in memory until then.

Letters: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence

import torch

from pipeline.artifacts.check_result import TunedDrift
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.config import CheckConfig
from pipeline.conversations.conversation import Conversation, RowRejected
from pipeline.evaluation.answer_files import Line
from pipeline.evaluation.answers import log_probabilities, model_answer
from pipeline.evaluation.prompts import Prompt, ask_questions, question_ids
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.targets.loading import load_on_gpus
from pipeline.targets.spec import TargetSpec, load_tokenizer
from pipeline.training.backbone_losses import Drift

MAX_POSITIONS = 2048  # gives a KL of 0.01 to about 10 %; takes 1 GB at V = 128k
ORIGINAL = "original"


def compare_with_original(
    original: TargetSpec,
    published: TargetSpec,
    rows: Sequence[TokenRow],
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
        rows: Held-out rows of the generate stage.
        questions: The check's questions, which the original answers; may be empty.
        gpus: The number of GPUs that each model spans; 0 is the CPU.
        name: The target's name in files of answers.

    Returns:
        The drift, and the original's answers in FastChat's schema. Questions without a usable
            answer are left out.
    """
    drift = published_drift(original, published, rows, gpus)
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
    original: TargetSpec, published: TargetSpec, rows: Sequence[TokenRow], gpus: int = 0
) -> TunedDrift:
    """Measure the published model's drift from the original on spans of held-out rows.

    At most `MAX_POSITIONS` target-written tokens are compared.
    """
    prompts, answers = first_positions(rows)
    model = load_on_gpus(original, gpus)
    expected = [log_p_TV.cpu() for log_p_TV in log_probabilities(model, prompts, answers)]
    del model
    gc.collect()
    model = load_on_gpus(published, gpus)
    drift = Drift.zero(torch.device("cpu"))
    found = log_probabilities(model, prompts, answers)
    for log_p_TV, log_q_TV, answer in zip(expected, found, answers, strict=True):
        drift.add(log_p_TV, log_q_TV.cpu(), torch.tensor(answer))
    return drift.figures()


def first_positions(rows: Sequence[TokenRow]) -> tuple[list[Prompt], list[list[int]]]:
    """Select prompts and answers to measure drift on: the first `MAX_POSITIONS` answer tokens.

    Each span is an answer; its prompt is the row's tokens before it. The last answer may be cut.
    """
    room = MAX_POSITIONS
    prompts = []
    answers = []
    for row in rows:
        for span in row.spans:
            if room:
                ids = row.input_ids[: min(span.end, span.start + room)].tolist()
                prompts.append(Prompt(row.id, ids[: span.start]))
                answers.append(ids[span.start :])
                room -= len(answers[-1])
    return prompts, answers
