"""The original model beside the tuned one that is published: the drift of the weights, and its own
answers.

Drift is measured on the published weights, merged and rounded, not on the adapter that they were
made from. Both models are loaded one after the other and read the same held-out rows; the
original's log-probabilities of at most `MAX_POSITIONS` positions are kept in memory meanwhile.

Letters: N positions, V vocabulary.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.artifacts.check_result import Line, TunedDrift
from pipeline.artifacts.generated_rows import TokenRow
from pipeline.artifacts.json_form import from_json
from pipeline.config import CheckConfig
from pipeline.conversations.conversation import Conversation
from pipeline.decoding.readout import last_positions
from pipeline.evaluation.answers import model_answer
from pipeline.evaluation.prompts import answered_questions
from pipeline.execution.progress import ProgressReporter
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import TargetSpec, load_tokenizer
from pipeline.training.backbone_losses import Drift
from pipeline.training.evaluation import summarized

MAX_POSITIONS = 2048  # a KL of 0.01 is then known to about a tenth; at V = 128k they take 1 GB
ORIGINAL = "original"


@dataclass(frozen=True)
class OriginalRequest:
    """What is compared; picklable, because it crosses to the process that decodes.

    Attributes:
        original, published: The model that was tuned, and the merged one, both with room for the
            questions.
        rows: Held-out rows of the generate stage.
        questions: A file's, which the original answers; empty for none.
        gpus: How many each model spans; 0 is the CPU.
        name: The target's in files of answers.
    """

    original: TargetSpec
    published: TargetSpec
    rows: Sequence[TokenRow]
    questions: Sequence[Conversation]
    settings: CheckConfig
    gpus: int
    name: str


def beside_the_original(
    request: OriginalRequest, progress: ProgressReporter | None = None
) -> tuple[TunedDrift, list[Line]]:
    """The drift of the published weights, and the original's answers in FastChat's schema."""
    drift = published_drift(request.original, request.published, request.rows, request.gpus)
    if not request.questions:
        return drift, []
    return drift, _answers(request, progress)


@torch.inference_mode()
def published_drift(
    original: TargetSpec, published: TargetSpec, rows: Sequence[TokenRow], gpus: int = 0
) -> TunedDrift:
    """How far the published model's predictions are from the original's where the original
    wrote.
    """
    device = "cuda" if gpus else "cpu"
    chosen = first_positions(rows)
    model = load_causal_lm(original, device, max(1, gpus))
    expected = [log_p_NV.cpu() for log_p_NV, _ in _log_probabilities(model, chosen)]
    del model
    gc.collect()
    model = load_causal_lm(published, device, max(1, gpus))
    drift = Drift.zero(torch.device("cpu"))
    found = _log_probabilities(model, chosen)
    for log_p_NV, (log_q_NV, labels_N) in zip(expected, found, strict=True):
        _add(drift, log_p_NV, log_q_NV.cpu(), labels_N.cpu())
    return from_json(TunedDrift, summarized(drift))


def _add(drift: Drift, log_p_NV: Tensor, log_q_NV: Tensor, labels_N: Tensor) -> None:
    labels_N1 = labels_N[:, None]
    drift.kl.add_((log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(dtype=torch.float64))
    drift.original_loss.sub_(log_p_NV.gather(1, labels_N1).sum(dtype=torch.float64))
    drift.tuned_loss.sub_(log_q_NV.gather(1, labels_N1).sum(dtype=torch.float64))
    drift.agreed.add_((log_p_NV.argmax(1) == log_q_NV.argmax(1)).sum())
    drift.positions.add_(len(labels_N))


def first_positions(rows: Sequence[TokenRow], room: int = MAX_POSITIONS) -> list[TokenRow]:
    """The first `room` target-written tokens of rows that have any; the last row is cut there."""
    chosen: list[TokenRow] = []
    for row in rows:
        spans = []
        for span in row.spans:
            if room:
                spans.append(replace(span, end=min(span.end, span.start + room)))
                room -= len(spans[-1])
        if spans:
            chosen.append(replace(row, spans=spans))
    return chosen


def _log_probabilities(model: Any, rows: Sequence[TokenRow]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each row the log-probabilities [N, V] at its target-written tokens, and these
    tokens [N].
    """
    for row in rows:
        ids, first, last = row.input_ids.tolist(), row.spans[0].start, row.spans[-1].end
        _, logits_TV = last_positions(model, ids[: last - 1], last - first)
        written = [place for span in row.spans for place in range(span.start, span.end)]
        logits_NV = logits_TV[torch.tensor(written, device=logits_TV.device) - first]
        yield logits_NV.float().log_softmax(-1), torch.tensor([ids[place] for place in written])


def _answers(request: OriginalRequest, progress: ProgressReporter | None) -> list[Line]:
    """The original's answers to the questions, each turn after its own to the turns before."""
    original, settings, gpus = request.original, request.settings, request.gpus
    tokenizer = load_tokenizer(original)
    lines = []
    for question, turns in answered_questions(
        original, request.questions, settings, "transformers", gpus, progress
    ):
        texts = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in turns]
        lines.append(model_answer(question, f"{request.name}-{ORIGINAL}", texts))
    return lines
