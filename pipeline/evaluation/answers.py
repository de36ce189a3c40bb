"""Compare decoded answers with plain decoding's, score their text, and format them for files.

`compare` counts greedy answers that are identical token for token and those that first differ at a
tie. Forwards of different shapes round differently, so if the target's top two logits differ by no
more than a tolerance, either token is its greedy choice. Only the first difference counts: after it
the sequences have different prefixes.

`answer_lines` formats answers in Spec-Bench's schema (github.com/hemingkx/Spec-Bench, Xia et al.,
arXiv 2401.07851), an extension of FastChat's: one line per question. `new_tokens` and `wall_time`
cover whole answers including the prefill, `decoding_steps` and `accept_lengths` the steps after it.
The mean of `accept_lengths` is the acceleration rate.

Letters: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.artifacts.check_result import (
    Difference,
    GreedyMatch,
    Sample,
    SampleToken,
)
from pipeline.config import CheckConfig
from pipeline.conversations.requests import TextStream
from pipeline.decoding.decoder import Decoded
from pipeline.decoding.steps import last_positions
from pipeline.evaluation.answer_files import Line
from pipeline.evaluation.prompts import Prompt, spread
from pipeline.targets.spec import TargetSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AnswerLines = dict[str, list[Line]]  # by method

NUM_SAMPLES = 2  # decoded answers in the report
NUM_SHOWN = 4  # tokens of each side of a difference

# A top-2 logit gap up to this is a tie. In half precision, which rounds the logits, it is four
# rounding steps at logits of 16 to 32, where the best logits of chat models lie.
TIE_TOLERANCE = {"float32": 1e-4, "float16": 0.0625, "bfloat16": 0.5}

# In every dtype: bitsandbytes' 8-bit layers round inputs to 1/127 of their largest number, about
# as coarse as bfloat16's 8 bits. Its 4-bit layers multiply in bfloat16 on a CPU.
QUANTIZED_TOLERANCE = TIE_TOLERANCE["bfloat16"]


@dataclass(frozen=True)
class Comparison:
    """Counts of greedy answers that match plain decoding, and the differences that are not ties."""

    match: GreedyMatch
    differing: list[Difference]

    @property
    def largest_gap(self) -> float | None:
        """The largest top-2 logit gap of `differing`, to 3 significant digits; None if empty."""
        if not self.differing:
            return None
        return float(f"{max(each.gap for each in self.differing):.3g}")


def tie_tolerance(target: TargetSpec, settings: CheckConfig) -> float:
    """Return the top-2 logit gap up to which the check counts a greedy difference as a tie."""
    if settings.tie_tolerance is not None:
        return settings.tie_tolerance
    if target.rounding or target.quantization:
        return QUANTIZED_TOLERANCE
    return TIE_TOLERANCE[target.dtype]


def compare(
    prompts: Sequence[Prompt],
    plain: Sequence[list[int]],
    other: Sequence[list[int]],
    gap_at: Callable[[list[int]], float],
    tolerance: float,
) -> Comparison:
    """Compare a method's greedy answers with plain decoding's, token by token.

    Args:
        plain, other: The answers of plain decoding, and of the method.
        gap_at: Returns the target's top-2 logit gap after a prefix; called only if answers differ.
        tolerance: A gap up to this is a tie.
    """
    identical = ties = 0
    differing = []
    for prompt, left, right in zip(prompts, plain, other, strict=True):
        if left == right:
            identical += 1
            continue
        at = 0  # of the first difference
        while left[at : at + 1] == right[at : at + 1]:
            at += 1
        gap = gap_at(prompt.ids + left[:at])
        if gap <= tolerance:
            ties += 1
        else:
            shown = slice(at, at + NUM_SHOWN)
            differing.append(Difference(prompt.id, at, gap, left[shown], right[shown]))
    return Comparison(GreedyMatch(len(plain), identical, ties), differing)


def top_2_gap(model: PreTrainedModel, prefix: list[int]) -> float:
    """Compute the gap between the target's two largest logits after a prefix, by one forward."""
    _, logits_1V = last_positions(model, prefix, 1)
    best, second = logits_1V[0].double().topk(2).values.tolist()
    return best - second


def mean_log_likelihood(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> float:
    """Compute the mean log-likelihood of the answers' tokens under the target, at temperature 1.

    The unit is nats per token, over all answers together.
    """
    likelihoods = []
    for log_p_TV, answer in zip(log_probabilities(model, prompts, answers), answers, strict=True):
        written_T1 = torch.tensor(answer, device=log_p_TV.device)[:, None]
        likelihoods += log_p_TV.gather(-1, written_T1)[:, 0].tolist()
    return statistics.fmean(likelihoods)


def log_probabilities(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> Iterator[Tensor]:
    """Yield the target's log-probabilities [T, V] for each answer, in fp32.

    Row i is the distribution that predicts the answer's token i.
    """
    for prompt, answer in zip(prompts, answers, strict=True):
        _, logits_TV = last_positions(model, prompt.ids + answer[:-1], len(answer))
        yield logits_TV.float().log_softmax(-1)


def answer_lines(
    model_id: str,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    repetitions: Sequence[Sequence[Decoded]],
) -> list[Line]:
    """Format a decoding method's answers in Spec-Bench's schema, one line per question.

    Texts and counts are those of the first repetition, wall times are medians over all repetitions.
    """
    lines = {}
    for prompt, answer, *others in zip(prompts, *repetitions, strict=True):
        name = prompt.conversation
        if name not in lines:
            lines[name] = {**model_answer(name, model_id, []), "category": prompt.category or ""}
            for key in ("decoding_steps", "new_tokens", "wall_time", "accept_lengths"):
                lines[name]["choices"][0][key] = []
        choice = lines[name]["choices"][0]
        seconds = [each.seconds_prefill + each.seconds for each in (answer, *others)]
        choice["turns"].append(tokenizer.decode(answer.token_ids, skip_special_tokens=True).strip())
        choice["decoding_steps"].append(answer.num_steps)
        choice["new_tokens"].append(len(answer.token_ids))
        choice["wall_time"].append(statistics.median(seconds))
        choice["accept_lengths"] += answer.accepted
    return list(lines.values())


def model_answer(question_id: int | str, model_id: str, turns: list[str]) -> Line:
    """Return a model's answers to the turns of a question, in the schema of FastChat's judge."""
    return {
        "question_id": question_id,
        "answer_id": f"{model_id}/{question_id}",
        "model_id": model_id,
        "choices": [{"index": 0, "turns": turns}],
        "tstamp": time.time(),
    }


def samples(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], decoded: Sequence[Decoded]
) -> list[Sample]:
    """Return the `NUM_SAMPLES` longest answers and their prompts, with each token's decoding step.

    Each answer is of another conversation. Step 0 is the prefill.
    """
    found = []
    answers = [(prompts[index], decoded[index]) for index in spread(prompts, len(prompts))]
    answers.sort(key=lambda pair: -len(pair[1].token_ids))
    for prompt, answer in answers[:NUM_SAMPLES]:
        steps = [0]
        for step, kept in enumerate(answer.accepted, start=1):
            steps += [step] * kept
        stream = TextStream(tokenizer)
        texts = [stream.push(token) for token in answer.token_ids]
        texts[-1] += stream.flush()
        tokens = [SampleToken(text, step) for text, step in zip(texts, steps, strict=True)]
        found.append(Sample(tokenizer.decode(prompt.ids, skip_special_tokens=True), tokens))
    return found
