"""Measure the speed of decoding methods and of transformers' baselines on the same prompts.

    acceleration rate  tokens kept / forward passes after the prefill, pooled over sequences
    standard error     of the acceleration rate, over the choice of conversations
    overhead           seconds per step with heads / seconds per plain step
    speedup            tokens per second / plain tokens per second, which is acceleration rate /
                       overhead

Seconds exclude the prefill, and are medians over the repetitions. If every answer ended with its
first token, figures of steps are None.

Baselines (`check.baselines`) that are transformers' greedy decoding; drafted.py has the others:

    generate       plain decoding with its dynamic cache
    prompt-lookup  guesses are the tokens that followed an earlier occurrence of the last tokens
    assistant      guesses of a smaller model with the same vocabulary (`check.assistant_model`)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from pipeline.artifacts.check_result import (
    Baseline,
    Category,
    EngineFigures,
    Speed,
)
from pipeline.artifacts.json_form import rounded
from pipeline.artifacts.seen_answers import ENOUGH_NEW, NewAnswers
from pipeline.config import BaselineName
from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.decoder import Decoded, Decoder, acceleration_rate
from pipeline.decoding.held_out import Estimate, rate_of_answers
from pipeline.errors import ConfigError
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import TargetSpec, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Figures = TypeVar("Figures", bound=EngineFigures)
Decode = Callable[[list[int], int], Decoded]  # (prompt, sampling seed)
Pass = Mapping[str, Sequence[Decoded]]  # one repetition: each method's answers, by prompt

PLAIN, ACCELERATED = "plain", "accelerated"
NUM_LOOKED_UP = 10  # guesses per step of prompt lookup, as in transformers' guide


def decode_by(decoder: Decoder, rule: AcceptanceRule, num_tokens: int) -> Decode:
    """Return a decoding method: a function that decodes a prompt with this decoder and rule.

    The method's second argument is a seed, which rules that sample use.

    Args:
        num_tokens: The maximum number of new tokens.
    """

    def decode(prompt_ids: list[int], seed: int) -> Decoded:
        generator = None
        if rule.samples:
            generator = torch.Generator(decoder.device).manual_seed(seed)
        return decoder.generate(prompt_ids, num_tokens, rule, generator)

    return decode


class CannotDecode(Exception):
    """Error of a baseline that cannot decode a prompt of the check; its text is the reason.

    Plain decoding and decoding with the heads never raise it.
    """


class ForwardRecorder(BaseStreamer):
    """Streamer that records the tokens and the time of each forward pass of a measured baseline."""

    def __init__(self) -> None:
        self.forwards: list[list[int]] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Record token ids and the time.

        transformers calls this with the prompt, and then with the new tokens of each forward pass.
        """
        self.forwards.append(value.flatten().tolist())
        self.times.append(perf_counter())

    def end(self) -> None:
        """Do nothing; transformers calls this at the end of a text."""


def baseline(
    name: BaselineName,
    model: PreTrainedModel,
    eos_token_ids: tuple[int, ...],
    max_new_tokens: int,
    assistant: TargetSpec | None = None,
) -> Decode:
    """Return a greedy decoding method of transformers: generate, prompt-lookup or assistant.

    The generation settings of `model` are replaced by transformers' defaults. The method raises
    `CannotDecode` if transformers cannot decode a prompt in this way.

    Args:
        assistant: The model of the method `assistant`; the others ignore it.

    Raises:
        ConfigError, EnvironmentFault: The assistant cannot be loaded.
    """
    device = input_device(model)
    generation = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_token_ids),
        pad_token_id=0,
        prompt_lookup_num_tokens=NUM_LOOKED_UP if name == "prompt-lookup" else None,
    )
    assistant_model = None
    if name == "assistant":
        assert assistant is not None, "CheckConfig asks for both or neither"
        assistant_model = load_causal_lm(assistant, device)
    model.generation_config = GenerationConfig()  # generate takes unset values from it

    def decode(prompt_ids: list[int], seed: int) -> Decoded:
        ids_1T = torch.tensor([prompt_ids], device=device)
        mask_1T = torch.ones_like(ids_1T)
        recorder = ForwardRecorder()
        start = perf_counter()
        try:
            model.generate(
                ids_1T,
                attention_mask=mask_1T,
                streamer=recorder,
                generation_config=generation,
                assistant_model=assistant_model,
            )
        except Exception as error:  # a model's or a cache's code may raise any error
            raise CannotDecode(one_line(error)) from error
        _, *forwards = recorder.forwards  # the first is the prompt
        _, first, *_ = recorder.times
        last = recorder.times[-1]
        token_ids = [token for new_ids in forwards for token in new_ids]
        finished: Literal["stop", "length"] = "stop" if token_ids[-1] in eos_token_ids else "length"
        accepted = [len(new_ids) for new_ids in forwards[1:]]
        return Decoded(token_ids, finished, accepted, first - start, last - first)

    return decode


def take_turns(
    methods: Mapping[str, Decode],
    prompts: Sequence[Prompt],
    failed: dict[str, str],
    progress: ProgressReporter = SILENT,
) -> Pass:
    """Decode all prompts once, with the methods in turn for each prompt; return their answers.

    Because of the turns, changes in the machine's speed affect all methods alike. A prompt's index
    is its seed. A method that fails on a prompt is skipped from there on and left out of the
    result; `failed` receives the reason, and methods already in it are skipped. `progress` counts
    the answers, those that are skipped too.
    """
    written: dict[str, list[Decoded]] = {name: [] for name in methods if name not in failed}
    for seed, prompt in enumerate(prompts):
        for name, decode in methods.items():
            num_tokens = 0
            if name in written:
                try:
                    answer = decode(prompt.ids, seed)
                    written[name].append(answer)
                    num_tokens = len(answer.token_ids)
                except CannotDecode as reason:
                    failed[name] = str(reason)
                    del written[name]
            progress.advance(tokens=num_tokens)
    return written


@dataclass(frozen=True)
class Pace:
    """One decoding method's measured rate and speed.

    If every answer ended with its first token, rate and speed are NaN.
    """

    acceleration_rate: float
    tokens_per_second: float
    range: list[float] | None  # see `range_of`

    @classmethod
    def of(cls, passes: Sequence[Pass], method: str) -> Pace:
        """Compute a method's rate and speed from its answers in every repetition.

        The rate and the number of tokens are taken from the first repetition; they are the same in
        all.
        """
        first = passes[0][method]
        seconds = [sum(one.seconds for one in answers[method]) for answers in passes]
        num_tokens = sum(sum(one.accepted) for one in first)
        speed, slowest_to_fastest = math.nan, None
        if num_tokens:
            speed = num_tokens / statistics.median(seconds)
            slowest_to_fastest = range_of([num_tokens / taken for taken in seconds])
        return cls(
            acceleration_rate=acceleration_rate(first),
            tokens_per_second=speed,
            range=slowest_to_fastest,
        )


def range_of(speeds: Sequence[float]) -> list[float] | None:
    """Return the lowest and highest speed of several repeats; None for one repeat."""
    if len(speeds) < 2:
        return None
    return [round(min(speeds), 2), round(max(speeds), 2)]


def require_steps(accepted: Iterable[Sequence[int]]) -> None:
    """Raise ConfigError if every decoded answer ended with its first token.

    Args:
        accepted: Per answer, the number of tokens that each step adds, as in `Decoded`.
    """
    if not any(accepted):
        raise ConfigError(
            "Every answer ended with its first token, so that there is no step to measure.",
            "check.max_new_tokens",
            "Raise it, or check with other prompts.",
        )


def check_speed(
    prompts: Sequence[Prompt], passes: Sequence[Pass], method: str = ACCELERATED
) -> Speed:
    """Compute the rate, overhead and speed of a method, and the speed of plain decoding."""
    plain = Pace.of(passes, PLAIN)
    pace = Pace.of(passes, method)
    speedup = pace.tokens_per_second / plain.tokens_per_second
    accepted = [one.accepted for one in passes[0][method]]
    return Speed(
        acceleration_rate=rounded(pace.acceleration_rate),
        standard_error=rounded(check_rate(prompts, accepted).standard_error),
        overhead=rounded(pace.acceleration_rate / speedup),
        speedup=rounded(speedup),
        tokens_per_second=rounded(pace.tokens_per_second, 2),
        baseline_tokens_per_second=rounded(plain.tokens_per_second, 2),
        range=pace.range,
        baseline_range=plain.range,
    )


def check_rate(prompts: Sequence[Prompt], accepted: Sequence[Sequence[int]]) -> Estimate:
    """Estimate the acceleration rate of decoded answers, with its standard error.

    Args:
        accepted: Per answer, the number of tokens that each step adds, as in `Decoded`.
    """
    return rate_of_answers(accepted, [prompt.conversation for prompt in prompts])


def with_new_answers(
    figures: Figures,
    request: CheckRequest,
    answers: Sequence[Sequence[int]],
    accepted: Sequence[Sequence[int]],
) -> Figures:
    """Add to the figures the share of answers in training rows, and the others' acceleration rate.

    The number of the others is added too. With fewer than `ENOUGH_NEW` there is no rate. If the
    training rows are unknown, the figures are returned unchanged.
    """
    if request.trained is None:
        return figures
    seen = request.trained.answers()
    prompts = []
    new_accepted = []
    for prompt, answer, kept in zip(request.prompts, answers, accepted, strict=True):
        if list(answer) not in seen:
            prompts.append(prompt)
            new_accepted.append(kept)
    new = NewAnswers(answers=len(prompts))
    if len(prompts) >= ENOUGH_NEW:
        found = check_rate(prompts, new_accepted)
        error = rounded(found.standard_error)
        new = replace(new, acceleration_rate=rounded(found.rate), standard_error=error)
    return replace(figures, seen_share=round(1 - len(prompts) / len(answers), 4), new=new)


def baseline_figures(prompts: Sequence[Prompt], passes: Sequence[Pass], name: str) -> Baseline:
    """Compute the speed of a baseline; its speedup is over plain decoding."""
    found = check_speed(prompts, passes, name)
    return Baseline(
        name=name,
        acceleration_rate=found.acceleration_rate,
        speedup=found.speedup,
        tokens_per_second=found.tokens_per_second,
        range=found.range,
        categories=by_category(prompts, passes, name),
    )


def members_of_categories(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Return the indices of each category's prompts, in order of appearance.

    Prompts without a category are left out.
    """
    members: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        if prompt.category:
            members.setdefault(prompt.category, []).append(index)
    return members


def by_category(
    prompts: Sequence[Prompt], passes: Sequence[Pass], method: str = ACCELERATED
) -> list[Category]:
    """Compute the speed of a method and of plain decoding for each category of prompts."""
    rows = []
    for category, indices in members_of_categories(prompts).items():
        parts = []
        for each in passes:
            part = {name: [answers[i] for i in indices] for name, answers in each.items()}
            parts.append(part)
        found = check_speed([prompts[i] for i in indices], parts, method)
        rows.append(Category(category=category, prompts=len(indices), **vars(found)))
    return rows
