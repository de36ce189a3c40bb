"""Decoded answers: compared with the target's own, scored as text, and written to files.

`compare` counts greedy answers that are identical token for token, those that first differ at a
tie, and lists the rest. Forwards of different shapes round differently, so where the target's top
two logits are closer than a tolerance either token is its greedy choice. Only the first difference
counts: after it the sequences have different prefixes.

`answer_lines` follow Spec-Bench's schema (github.com/hemingkx/Spec-Bench, Xia et al., arXiv
2401.07851): one line per question; `new_tokens` and `wall_time` cover whole answers including the
prefill, `decoding_steps` and `accept_lengths` the steps after it, so that the mean of
`accept_lengths` is the acceleration rate.

Letters: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipeline.config import CheckConfig
from pipeline.conversations.repetition import distinct_n
from pipeline.conversations.text_stream import TextStream
from pipeline.decoding.decoder import Decoded
from pipeline.decoding.steps import last_positions
from pipeline.evaluation.prompts import Prompt
from pipeline.targets.spec import TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_SAMPLES = 2  # decoded answers that the report shows

# A top-2 logit gap up to this is a tie. Half precision rounds the logits themselves: this is four
# of its steps at logits of 16 to 32, where the best logits of chat models lie.
TIE_TOLERANCE = {"float32": 1e-4, "float16": 0.0625, "bfloat16": 0.5}

# bitsandbytes' 8-bit layers round what they read to 127 steps of its largest number, as coarse as
# bfloat16's 8 bits, in any dtype: a last bit that differs becomes a step, and which columns are
# kept apart depends on all positions of a forward. Its 4-bit layers multiply in bfloat16 on a CPU,
# in any dtype: a forward of one position, one of several. On a GPU these multiply in the target's
# dtype.
AS_COARSE = "bfloat16"


@dataclass
class GreedyMatch:
    """How many sequences are identical, how many first differ at a tie, and the others."""

    sequences: int = 0
    identical: int = 0
    ties: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, int]:
        return {"sequences": self.sequences, "identical": self.identical, "ties": self.ties}

    def largest_gap(self) -> dict[str, float]:
        """The largest top-2 gap at which a sequence that is no tie differs, for the figures of an
        engine.
        """
        gaps = [differing["gap"] for differing in self.differing]
        return {"largest_gap": float(f"{max(gaps):.3g}")} if gaps else {}


def tie_tolerance(target: TargetSpec, settings: CheckConfig, *, on_gpu: bool) -> float:
    """The configured tolerance, or the default: the larger of the dtype's and the quantization's,
    where it runs.
    """
    if settings.tie_tolerance is not None:
        return settings.tie_tolerance
    rounding = target.rounding or target.quantization
    is_coarse = rounding == "8bit" or (rounding == "4bit" and not on_gpu)
    return max(TIE_TOLERANCE[target.dtype], TIE_TOLERANCE[AS_COARSE] if is_coarse else 0.0)


def compare(
    prompts: Sequence[Prompt],
    plain: Sequence[list[int]],
    other: Sequence[list[int]],
    gap_at: Callable[[list[int]], float],
    tolerance: float,
) -> GreedyMatch:
    """Compare greedy answers to the same prompts.

    Args:
        gap_at: The target's top-2 logit gap after a prefix; called only where answers differ.
        tolerance: A gap up to this is a tie.
    """
    match = GreedyMatch(len(plain))
    for prompt, left, right in zip(prompts, plain, other, strict=True):
        if left == right:
            match.identical += 1
            continue
        shorter = min(len(left), len(right))
        at = next((i for i in range(shorter) if left[i] != right[i]), shorter)
        gap = gap_at(prompt.ids + left[:at])
        if gap <= tolerance:
            match.ties += 1
        else:
            parts = {"plain": left[at : at + 4], "other": right[at : at + 4]}
            match.differing.append({"id": prompt.id, "at": at, "gap": gap, **parts})
    return match


def top_2_gap(model: PreTrainedModel, prefix: list[int]) -> float:
    """The target's top-2 logit gap after a prefix, by one plain forward."""
    _, logits_1V = last_positions(model, prefix, 1)
    best, second = logits_1V[0].double().topk(2).values.tolist()
    return best - second


def text_statistics(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> dict[str, float]:
    """Share of distinct 4-grams of the answers, and the target's mean entropy [nats] at their
    positions.
    """
    entropies: list[float] = []
    for log_p_TV in _log_probabilities(model, prompts, answers):
        entropies += torch.special.entr(log_p_TV.exp()).sum(-1).tolist()
    distinct = statistics.fmean(distinct_n(answer, 4) for answer in answers)
    return {
        "distinct_4": round(distinct, 4),
        "mean_entropy_nats": round(statistics.fmean(entropies), 4),
    }


def mean_log_likelihood(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> float:
    """Mean log-likelihood [nats per token] of the answers under the target, at temperature 1."""
    likelihoods: list[float] = []
    for log_p_TV, answer in zip(_log_probabilities(model, prompts, answers), answers, strict=True):
        written_T1 = torch.tensor(answer, device=log_p_TV.device)[:, None]
        likelihoods += log_p_TV.gather(-1, written_T1)[:, 0].tolist()
    return statistics.fmean(likelihoods)


def _log_probabilities(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> Iterator[Tensor]:
    """For each answer, the target's log-probabilities [T, V] at its tokens."""
    for prompt, answer in zip(prompts, answers, strict=True):
        _, logits_TV = last_positions(model, prompt.ids + answer[:-1], len(answer))
        yield logits_TV.float().log_softmax(-1)


def answer_lines(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    repetitions: Sequence[Sequence[Decoded]],
) -> list[dict[str, Any]]:
    """One method's answers, one line per question; texts are the first repetition's, times medians
    over all.
    """
    lines: dict[int | str, dict[str, Any]] = {}
    for index, prompt in enumerate(prompts):
        name = prompt.id if prompt.question_id is None else prompt.question_id
        if name not in lines:
            empty: dict[str, Any] = {
                key: []
                for key in ("turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths")
            }
            lines[name] = {
                "question_id": name,
                "category": prompt.category or "",
                "answer_id": _answer_id(model_id, name),
                "model_id": model_id,
                "choices": [{"index": 0, **empty}],
                "tstamp": time.time(),
            }
        (choice,) = lines[name]["choices"]
        answer = repetitions[0][index]
        seconds = statistics.median(
            answers[index].seconds_prefill + answers[index].seconds for answers in repetitions
        )
        choice["turns"].append(tokenizer.decode(answer.token_ids, skip_special_tokens=True).strip())
        choice["decoding_steps"].append(answer.num_steps)
        choice["new_tokens"].append(len(answer.token_ids))
        choice["wall_time"].append(seconds)
        choice["accept_lengths"] += answer.accepted
    return list(lines.values())


def model_answer(question_id: int | str, model_id: str, turns: list[str]) -> dict[str, Any]:
    """A model's answer to one question in FastChat's model-answer schema, which its judge reads,
    and nothing else.
    """
    return {
        "question_id": question_id,
        "answer_id": _answer_id(model_id, question_id),
        "model_id": model_id,
        "choices": [{"index": 0, "turns": turns}],
        "tstamp": time.time(),
    }


def model_answers(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Lines of `answer_lines` in FastChat's model-answer schema."""
    return [
        model_answer(line["question_id"], line["model_id"], line["choices"][0]["turns"])
        for line in lines
    ]


def _answer_id(model_id: str, question_id: int | str) -> str:
    return hashlib.sha256(f"{model_id}/{question_id}".encode()).hexdigest()[:22]


def samples(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], decoded: Sequence[Decoded]
) -> list[dict[str, Any]]:
    """The first answers, each token with the step that produced it (0 is the prefill)."""
    found = []
    for prompt, answer in list(zip(prompts, decoded, strict=True))[:NUM_SAMPLES]:
        steps = [0] + [
            step for step, kept in enumerate(answer.accepted, start=1) for _ in range(kept)
        ]
        stream = TextStream(tokenizer)
        texts = [stream.push(token) for token in answer.token_ids]
        texts[-1] += stream.flush()
        question = tokenizer.decode(prompt.ids, skip_special_tokens=True)
        tokens = [{"text": text, "step": step} for text, step in zip(texts, steps, strict=True)]
        found.append({"prompt": question, "tokens": tokens})
    return found
