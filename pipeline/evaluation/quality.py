"""What the answers are worth as text: how varied, how sure the target was, and how likely it finds what was written."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.conversations.repetition import distinct_n
from pipeline.evaluation.forward import last_positions
from pipeline.evaluation.prompts import Prompt

# T answer tokens, V vocabulary


def text_statistics(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> dict[str, float]:
    """How varied plain greedy answers are, and how sure the target is: its mean entropy where it chose their tokens."""
    entropies: list[float] = []
    for log_p_TV in _log_probabilities(model, prompts, answers):
        entropies += torch.special.entr(log_p_TV.exp()).sum(-1).tolist()
    distinct = statistics.fmean(distinct_n(answer, 4) for answer in answers)
    return {"distinct_4": round(distinct, 4), "mean_entropy_nats": round(statistics.fmean(entropies), 4)}


def mean_log_likelihood(model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]) -> float:
    """Nats per token of the answers under the target, at temperature 1: how far a rule strays from its text."""
    likelihoods: list[float] = []
    for log_p_TV, answer in zip(_log_probabilities(model, prompts, answers), answers, strict=True):
        written_T1 = torch.tensor(answer, device=log_p_TV.device)[:, None]
        likelihoods += log_p_TV.gather(-1, written_T1)[:, 0].tolist()
    return statistics.fmean(likelihoods)


def _log_probabilities(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> Iterator[Tensor]:
    """Of every answer, the target's own distributions [T, V] that its tokens were chosen from."""
    for prompt, answer in zip(prompts, answers, strict=True):
        _, logits_TV = last_positions(model, prompt.ids + answer[:-1], len(answer))
        yield logits_TV.float().log_softmax(-1)
