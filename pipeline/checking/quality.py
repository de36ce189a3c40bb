"""What the answers are worth as text: how varied, how sure the target was, and how likely it finds what was written."""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.checking.prompts import Prompt
from pipeline.conversations.quality import distinct_n
from pipeline.targets.loading import input_device

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
        yield last_logits(model, prompt.ids + answer[:-1], len(answer)).float().log_softmax(-1)


@torch.inference_mode()
def last_logits(model: PreTrainedModel, ids: list[int], number: int) -> Tensor:
    """The logits [number, V] of a text's last positions. No others are made where the model can leave them out."""
    ids_1T = torch.tensor([ids], device=input_device(model))
    can_select = "logits_to_keep" in inspect.signature(model.forward).parameters
    selection: dict[str, Any] = {"logits_to_keep": number} if can_select else {}
    return model(input_ids=ids_1T, use_cache=False, **selection).logits[0, -number:]
