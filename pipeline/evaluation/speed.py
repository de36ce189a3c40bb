"""Speed figures of several decoding methods on the same prompts.

    acceleration rate  tokens kept / target forwards after the prefill, pooled over sequences
    standard error     of the acceleration rate, had other prompts of the same kind been asked
    overhead           seconds per step with heads / seconds per plain step
    speedup            tokens per second / plain tokens per second, which is acceleration rate /
    overhead

Seconds exclude the prefill. They are medians over the repetitions; times per answer are medians
over answers and repetitions. A figure is None where no answer took a step.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from pipeline.artifacts.seen_answers import ENOUGH_NEW, SeenAnswers
from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.decoder import Decoded, Decoder, acceleration_rate
from pipeline.decoding.held_out import rate_of_answers
from pipeline.errors import ConfigError
from pipeline.evaluation.prompts import Prompt, conversations_of
from pipeline.execution.progress import ProgressReporter

Decode = Callable[[list[int], int], Decoded]  # (prompt, sampling seed)
Pass = Mapping[str, Sequence[Decoded]]  # one repetition: each method's answers, by prompt

PLAIN, ACCELERATED = "plain", "accelerated"


def decode_by(decoder: Decoder, rule: AcceptanceRule, num_tokens: int) -> Decode:
    """Decoding by a rule; where it samples, from the seed."""

    def decode(prompt_ids: list[int], seed: int) -> Decoded:
        generator = torch.Generator(decoder.device).manual_seed(seed) if rule.samples else None
        return decoder.generate(prompt_ids, num_tokens, rule, generator)

    return decode


class CannotDecode(Exception):
    """A baseline cannot decode, with the reason; the checked methods never raise it."""


@contextmanager
def code_of_others() -> Iterator[None]:
    """Whatever a model's or a cache's code raises in here is the reason why a baseline cannot
    decode.
    """
    try:
        yield
    except Exception as error:
        raise CannotDecode((str(error).splitlines() or [type(error).__name__])[0]) from error


def take_turns(
    methods: Mapping[str, Decode],
    prompts: Sequence[Prompt],
    failed: dict[str, str] | None = None,
    progress: ProgressReporter | None = None,
) -> Pass:
    """Decode all prompts once, the methods in turn for each prompt, so that a drifting machine
    slows them all.

    A prompt's index is its seed. A method that fails on a prompt is skipped from there on and left
    out of the result; `failed` receives the reason, and methods already in it are skipped.
    """
    failed = {} if failed is None else failed
    written: dict[str, list[Decoded]] = {name: [] for name in methods}
    for seed, prompt in enumerate(prompts):
        num_tokens = 0
        for name, decode in methods.items():
            if name in failed:
                continue
            try:
                written[name].append(answer := decode(prompt.ids, seed))
                num_tokens += len(answer.token_ids)
            except CannotDecode as reason:
                failed[name] = str(reason)
        if progress:
            progress.advance(tokens=num_tokens)
    return {name: answers for name, answers in written.items() if name not in failed}


@dataclass(frozen=True)
class Pace:
    """One method's speed; NaN where it took no step."""

    acceleration_rate: float
    seconds_per_step: float
    tokens_per_second: float
    time_to_first_token: float
    time_per_output_token: float

    @classmethod
    def of(cls, repetitions: Sequence[Sequence[Decoded]]) -> Pace:
        """The speed of one method's answers, given by repetition."""
        first = repetitions[0]
        seconds = statistics.median(sum(one.seconds for one in answers) for answers in repetitions)
        every = [one for answers in repetitions for one in answers]
        per_token = [one.seconds / sum(one.accepted) for one in every if one.accepted]
        return cls(
            acceleration_rate=acceleration_rate(first),
            seconds_per_step=_ratio(seconds, sum(one.num_steps for one in first)),
            tokens_per_second=_ratio(sum(sum(one.accepted) for one in first), seconds),
            time_to_first_token=statistics.median(one.seconds_prefill for one in every),
            time_per_output_token=statistics.median(per_token) if per_token else math.nan,
        )

    def timed(self) -> dict[str, float | None]:
        """The figures of report.json that depend on the machine alone."""
        digits = {"tokens_per_second": 2, "time_to_first_token": 6, "time_per_output_token": 6}
        return {name: rounded(getattr(self, name), number) for name, number in digits.items()}


def require_steps(accepted: Iterable[Sequence[int]]) -> None:
    """Refuse answers of which none took a step; `accepted` as in `Decoded`.

    Raises:
        ConfigError: There is no step.
    """
    if not any(accepted):
        what = "Every answer ended with its first token, so that there is no step to measure."
        raise ConfigError(what, "check.max_new_tokens", "Raise it, or check with other prompts.")


def speed(prompts: Sequence[Prompt], passes: Sequence[Pass]) -> dict[str, float | None]:
    """The figures with heads and those of plain decoding."""
    plain, accelerated = (
        Pace.of([one[method] for one in passes]) for method in (PLAIN, ACCELERATED)
    )
    overhead = _ratio(accelerated.seconds_per_step, plain.seconds_per_step)
    found = rate_of_answers(
        [one.accepted for one in passes[0][ACCELERATED]], conversations_of(prompts)
    )
    figures = {
        "acceleration_rate": rounded(accelerated.acceleration_rate),
        "standard_error": rounded(found.standard_error),
        "overhead": rounded(overhead),
        "speedup": rounded(_ratio(accelerated.acceleration_rate, overhead)),
    }
    for name, figure in accelerated.timed().items():
        figures |= {name: figure, f"baseline_{name}": plain.timed()[name]}
    return figures


def rate_on_new_answers(
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    accepted: Sequence[Sequence[int]],
    trained: SeenAnswers,
) -> dict[str, Any]:
    """The share of answers that the target has also written in training rows, and the rate of the
    others.

    Args:
        answers: Token ids.
        accepted: Per answer, the tokens that each step kept.

    Returns:
        {"seen_share", "new": {"answers": their number, "acceleration_rate", "standard_error"}}; no
        rate where the new answers are fewer than `ENOUGH_NEW`.
    """
    is_new = [list(answer) not in trained for answer in answers]
    new: dict[str, Any] = {"answers": sum(is_new)}
    if sum(is_new) >= ENOUGH_NEW:
        conversations = conversations_of(prompts)
        found = rate_of_answers(
            list(compress(accepted, is_new)), list(compress(conversations, is_new))
        )
        new["acceleration_rate"] = rounded(found.rate)
        new["standard_error"] = rounded(found.standard_error)
    return {"seen_share": round(1 - sum(is_new) / len(is_new), 4), "new": new}


def pace_beside(passes: Sequence[Pass], method: str) -> dict[str, float | None]:
    """A baseline's figures; the speedup is over plain decoding."""
    plain, other = (Pace.of([one[name] for one in passes]) for name in (PLAIN, method))
    return {
        "acceleration_rate": rounded(other.acceleration_rate),
        "speedup": rounded(_ratio(other.tokens_per_second, plain.tokens_per_second)),
        **other.timed(),
    }


def by_category(prompts: Sequence[Prompt], passes: Sequence[Pass]) -> list[dict[str, Any]]:
    """`speed` for each category, in order of appearance; prompts without a category are left
    out.
    """
    keys = ("acceleration_rate", "speedup", "tokens_per_second", "baseline_tokens_per_second")
    rows = []
    for category, indices in categories_of(prompts).items():
        asked = [prompts[i] for i in indices]
        figures = speed(
            asked,
            [{name: [done[i] for i in indices] for name, done in one.items()} for one in passes],
        )
        rows.append(
            {"category": category, "prompts": len(indices), **{key: figures[key] for key in keys}}
        )
    return rows


def categories_of(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """The places of each category's prompts, in order of appearance."""
    members: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt.category:
            members.setdefault(prompt.category, []).append(index)
    return members


def steps_by_accepted_length(decoded: Sequence[Decoded]) -> list[int]:
    """The number of steps that accepted 0, 1, 2, … guesses."""
    counts = Counter(max(0, kept - 1) for one in decoded for kept in one.accepted)
    return [counts[length] for length in range(max(counts, default=0) + 1)]


def rounded(value: float, digits: int = 4) -> float | None:
    """The figure rounded, None where it is not finite."""
    return round(value, digits) if math.isfinite(value) else None


def _ratio(value: float, other: float) -> float:
    return value / other if other else math.nan
