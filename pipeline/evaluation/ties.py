"""Compare greedy answers with plain decoding's, and measure how close two tokens are at a tie.

Forwards of different shapes round differently, so if two tokens are nearly equal, either may be a
forward's greedy choice. Two answers are tied if, at their first difference, both chosen tokens lie
within a tolerance of the target's best logit. Only the first difference counts: after it the
answers have different prefixes.

The tolerance is 2δ. δ is the largest change of a logit between forward passes over the same text in
different shapes. If a pass moves each logit l(t) by at most δ from the reference r(t), and t is its
greedy choice, the reference's best token b is at most 2δ above t:

    r(t) >= l(t) - δ >= l(b) - δ >= r(b) - 2δ

δ is measured on some of plain decoding's own answers, over the largest logits of each place, since
no other token can be chosen. It is at least one rounding step of these logits, since identical
kernels round identically. The passes run in transformers, or in vLLM without drafts, so a fault in
the check's own decoding cannot widen the tolerance. vLLM's logits are compared with vLLM's: on a
chat model of 6.5M parameters in bfloat16, they differ by 0.2 from those of transformers, which
change by 0.06 between shapes.

Letters: T answer tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.artifacts.check_result import Difference, GreedyMatch
from pipeline.config import CheckConfig
from pipeline.decoding.steps import last_logits, last_positions
from pipeline.evaluation.prompts import Prompt, spread
from pipeline.targets.loading import input_device
from pipeline.targets.vllm_logits import LogitAnswer, LogitRequest, Logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_TEXTS = 4  # answers on which δ is measured
NUM_TOKENS = 64  # of each of them, at most
NUM_TOP = 4  # logits of each place
NUM_PREFIXES = 8  # of each answer, that vLLM reads in one forward
NUM_COPIES = 4  # of a text, in a batch
NUM_SHOWN = 4  # tokens of each side of a difference

BelowBest = Callable[[list[int], list[int]], list[float]]
"""Of a prefix and tokens: how far each token's logit is below the target's best next one."""


@dataclass(frozen=True)
class Comparison:
    """Counts of greedy answers that match plain decoding, and the differences that are not ties."""

    match: GreedyMatch
    differing: list[Difference]

    @property
    def largest_gap(self) -> float | None:
        """The largest distance of a token in `differing` from the best logit; None if empty."""
        gaps = []
        for each in self.differing:
            gaps += [gap for gap in (each.plain_below, each.other_below) if gap is not None]
        return float(f"{max(gaps):.3g}") if gaps else None


def tie_tolerance(change: float, settings: CheckConfig) -> float:
    """Return how far below the best logit the chosen tokens of a tie may be."""
    if settings.tie_tolerance is not None:
        return settings.tie_tolerance
    return 2 * change


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the index of the first token at which two different answers differ, or one ends."""
    at = 0
    while left[at : at + 1] == right[at : at + 1]:
        at += 1
    return at


def compare(
    prompts: Sequence[Prompt],
    plain: Sequence[list[int]],
    other: Sequence[list[int]],
    below_best: BelowBest,
    tolerance: float,
) -> Comparison:
    """Compare a method's greedy answers with plain decoding's, token by token.

    If one answer ends where the other continues, the difference is never a tie: end tokens are part
    of an answer, so the shorter one has no token there.

    Args:
        plain, other: The answers of plain decoding, and of the method.
        below_best: Called only if answers differ, for the tokens at their first difference.
        tolerance: Tokens up to this far below the best logit are tied.
    """
    identical = ties = tokens = 0
    differing = []
    for prompt, left, right in zip(prompts, plain, other, strict=True):
        if left == right:
            identical += 1
            tokens += len(left)
            continue
        at = first_difference(left, right)
        tokens += at + 1
        chosen = left[at : at + 1] + right[at : at + 1]
        below = dict(zip(chosen, below_best(prompt.ids + left[:at], chosen), strict=True))
        if len(chosen) == 2 and max(below.values()) <= tolerance:
            ties += 1
            continue
        difference = Difference(
            prompt.id,
            at,
            plain=left[at : at + NUM_SHOWN],
            other=right[at : at + NUM_SHOWN],
            plain_below=below[left[at]] if at < len(left) else None,
            other_below=below[right[at]] if at < len(right) else None,
        )
        differing.append(difference)
    return Comparison(GreedyMatch(len(plain), identical, ties, tokens), differing)


def below_best(model: PreTrainedModel, prefix: list[int], tokens: list[int]) -> list[float]:
    """Compute how far tokens are below the target's best logit after a prefix, in one pass."""
    _, logits_1V = last_positions(model, prefix, 1)
    logits_V = logits_1V[0].double()
    return (logits_V.max() - logits_V[tokens]).tolist()


def logit_change(places: Iterable[Sequence[Logits]], dtype: torch.dtype) -> float:
    """Compute δ from the logits of the same places in forwards of different shapes.

    Args:
        places: For each place in a text, its largest logits in each pass.
        dtype: The dtype of the logits.
    """
    change = largest = 0.0
    for forwards in places:
        for token in set.intersection(*map(set, forwards)):
            logits = [each[token] for each in forwards]
            change = max(change, max(logits) - min(logits))
            largest = max(largest, *map(abs, logits))
    _, exponent = math.frexp(largest)
    step = math.ldexp(torch.finfo(dtype).eps, exponent - 1)
    return max(change, step)


def measured_rows(prompts: Sequence[Prompt], answers: Sequence[Sequence[int]]) -> list[int]:
    """Choose up to `NUM_TEXTS` answers of at least two tokens fairly, by index."""
    rows = [row for row, answer in enumerate(answers) if len(answer) > 1]
    chosen = spread([prompts[row] for row in rows], NUM_TEXTS)
    return [rows[place] for place in chosen]


@torch.inference_mode()
def native_logit_change(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> float:
    """Measure δ in transformers, on a few of plain decoding's answers.

    Each answer is read in four shapes: the whole text in one pass, alone and in a batch of copies;
    and after the prompt is cached, token by token, as plain decoding reads it, and all tokens in
    one pass, as a tree is read.
    """
    places: list[list[Logits]] = []
    for row in measured_rows(prompts, answers):
        shapes = _logits_in_shapes(model, prompts[row].ids, answers[row][:NUM_TOKENS])
        top_TK = shapes[0].topk(NUM_TOP).indices
        values_TSK = torch.stack([each.gather(-1, top_TK).double() for each in shapes], 1)
        for ids, forwards in zip(top_TK.tolist(), values_TSK.tolist(), strict=True):
            places.append([dict(zip(ids, values, strict=True)) for values in forwards])
    return logit_change(places, model.dtype)


def _logits_in_shapes(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> list[Tensor]:
    """Return the logits [T, V] that predict an answer, from passes of four shapes."""
    text_1T = torch.tensor([prompt + answer[:-1]], device=input_device(model))
    num_prompt = len(prompt)
    num_answer = len(answer)
    shapes = []
    for copies in (1, NUM_COPIES):
        text_BT = text_1T.expand(copies, -1)
        found = model(input_ids=text_BT, use_cache=False, **last_logits(model, num_answer))
        shapes.append(found.logits[0, -num_answer:])
    for width in (1, num_answer):
        found = model(input_ids=text_1T[:, :num_prompt], use_cache=True, **last_logits(model, 1))
        rows = [found.logits[0, -1:]]
        for start in range(num_prompt, text_1T.shape[1], width):
            part_1N = text_1T[:, start : start + width]
            cache = found.past_key_values
            found = model(input_ids=part_1N, use_cache=True, past_key_values=cache)
            rows.append(found.logits[0])
        shapes.append(torch.cat(rows))
    return shapes


class VllmLogits:
    """The logits to ask of plain vLLM in order to compare its answers with other methods' answers.

    Answers are decoded again, all at once and one at a time, and some of their prefixes are read in
    one pass each: these shapes give δ. The places where a method's answer differs are read in
    the same way.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        plain: Sequence[list[int]],
        methods: Iterable[Sequence[list[int]]],
    ):
        self._answers: list[list[int]] = []
        self._prefixes: list[tuple[int, int]] = []
        texts: list[LogitRequest] = []
        for row in measured_rows(prompts, plain):
            ids = prompts[row].ids
            answer = plain[row][:NUM_TOKENS]
            places = range(0, len(answer), max(1, len(answer) // NUM_PREFIXES))
            self._prefixes += [(len(texts), at) for at in places]
            self._answers.append(answer)
            texts.append(LogitRequest(ids, num_tokens=len(answer), num_top=NUM_TOP))
        read = []
        for row, at in self._prefixes:
            ids = texts[row].prompt_ids + self._answers[row][:at]
            read.append(LogitRequest(ids, num_top=NUM_TOP))
        self._differences = []
        for answers in methods:
            for prompt, left, right in zip(prompts, plain, answers, strict=True):
                if left != right:
                    at = first_difference(left, right)
                    tokens = left[at : at + 1] + right[at : at + 1]
                    request = LogitRequest(prompt.ids + left[:at], token_ids=tokens)
                    self._differences.append(request)
        self.batches = [texts, *([text] for text in texts), read, self._differences]

    def change(self, found: Sequence[Sequence[LogitAnswer]], dtype: torch.dtype) -> float:
        """Compute δ from vLLM's logits for `batches`."""
        at_once, *alone, read, _ = found
        forwards: dict[tuple[int, int], list[Logits]] = {}
        for row, answer in enumerate(self._answers):
            for at in range(len(answer)):
                forwards[row, at] = []
                for text in (at_once[row], alone[row][0]):
                    if text.token_ids[:at] == answer[:at]:
                        forwards[row, at].append(text.logits[at])
        for place, text in zip(self._prefixes, read, strict=True):
            forwards[place].append(text.logits[0])
        return logit_change([each for each in forwards.values() if len(each) > 1], dtype)

    def below_best(self, found: Sequence[Sequence[LogitAnswer]]) -> BelowBest:
        """Return the distances from vLLM's best logit, looked up in its logits for `batches`."""
        logits_of = {}
        for request, answer in zip(self._differences, found[-1], strict=True):
            logits_of[tuple(request.prompt_ids), tuple(request.token_ids)] = answer.logits[0]

        def look_up(prefix: list[int], tokens: list[int]) -> list[float]:
            logits = logits_of[tuple(prefix), tuple(tokens)]
            return [max(logits.values()) - logits[token] for token in tokens]

        return look_up
