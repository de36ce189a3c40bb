"""Checks in vLLM: decoding with the heads against plain vLLM, offline and as a server under load.

If the export names the checked target, vLLM gets the export as its only model, as in `vllm serve
EXPORT`. Otherwise it gets target and heads separately. vLLM drafts the chain of the heads' top-1
guesses, never a tree, so its acceleration rate is lower than the native one. It is defined in the
same way: tokens kept over forward passes of the target, after the prefill and its token.

The study of load (`check.studies: [load]`) sends 1 to 64 requests at once to vLLM's server, with
and without heads: heads use computation that is idle only while requests are few. Client and server
share the machine. The acceleration rate of this study is over the drafts that the server counts
(see `vllm_load`), not over the forward passes of each request.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from pipeline.artifacts.check_result import (
    HEADS,
    CheckResult,
    LoadRow,
    Percentiles,
    VllmFigures,
)
from pipeline.artifacts.json_form import rounded
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.artifacts.tree_file import ChainLength
from pipeline.evaluation.prompts import CheckRequest
from pipeline.evaluation.served_figures import (
    load_rows_of_check,
    prompts_in_turn,
    served_method,
)
from pipeline.evaluation.speed import check_rate, range_of, require_steps, with_new_answers
from pipeline.evaluation.ties import VllmLogits, compare, tie_tolerance
from pipeline.evaluation.vllm_methods import compared_configs, heads_config
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.export.layout import Content, read_layout
from pipeline.targets.vllm_decode import DecodeTask, decode_in_vllm
from pipeline.targets.vllm_load import SERVERS, LoadFigures, LoadTask, serve_under_load
from pipeline.targets.vllm_logits import LOGITS

Task = TypeVar("Task", bound=DecodeTask)
LEVELS = (1, 2, 4, 8, 16, 32, 64)  # concurrent requests


def check_served(request: CheckRequest, progress: ProgressReporter = SILENT) -> CheckResult:
    """Check heads in vLLM: decode every prompt greedily without them and with them.

    Returns:
        The vLLM part of a check, with the greedy answers that differ by more than a tie.

    Raises:
        ConfigError: Every answer ended with its first token, so there is no step to measure.
    """
    settings = request.settings
    prompts = request.prompts
    drafting = heads_config(request)
    num_tokens = drafting["num_speculative_tokens"]
    progress.begin("vLLM starts", 0)
    task = DecodeTask(
        request.target,
        [prompt.ids for prompt in prompts],
        settings.max_new_tokens,
        in_turn=prompts_in_turn(prompts),
        repeats=settings.repeats,
        gpus=request.gpus,
    )
    compared = compared_configs(request)
    tasks = _tasks_of_methods(task, drafting_arguments(request), compared)
    plain, accelerated, *others = decode_in_vllm(tasks, progress.report)
    decoded = [each.token_ids for each in (accelerated, *others) if not each.failed]
    logits = VllmLogits(prompts, plain.token_ids, decoded)
    # Measured first and last, its repeats scatter as far as the machine's speed changes meanwhile.
    again = replace(
        task, name="plain vLLM again", repeats=1, engine_args=LOGITS, asked=logits.batches
    )
    (last,) = decode_in_vllm([again], progress.report)
    plain = plain.with_repeats(last)
    change = logits.change(last.logits, request.target.torch_dtype)
    tolerance = tie_tolerance(change, settings)
    comparison_of = functools.partial(
        compare,
        prompts,
        plain.token_ids,
        below_best=logits.below_best(last.logits),
        tolerance=tolerance,
    )
    answers = accelerated.token_ids
    accepted = accelerated.accepted
    require_steps(accepted)
    comparison = comparison_of(answers)
    heads = served_method(HEADS, drafting, prompts, accelerated, comparison.match)
    methods = [heads]
    loads = load_rows_of_check(heads, plain, accelerated)
    for (name, config), texts in zip(compared.items(), others, strict=True):
        match = None if texts.failed else comparison_of(texts.token_ids).match
        method = served_method(name, config, prompts, texts, match)
        methods.append(method)
        if not texts.failed:
            loads += load_rows_of_check(method, plain, texts)
    measured = check_rate(prompts, accepted)
    figures = VllmFigures(
        num_speculative_tokens=num_tokens,
        methods=methods,
        loads=loads,
        acceleration_rate=round(measured.rate, 4),
        standard_error=rounded(measured.standard_error),
        accepted_per_position=accepted_per_position(accepted, num_tokens),
        speedup=round(accelerated.tokens_per_second / plain.tokens_per_second, 4),
        tokens_per_second=round(accelerated.tokens_per_second, 2),
        baseline_tokens_per_second=round(plain.tokens_per_second, 2),
        range=range_of(accelerated.at_once()),
        baseline_range=range_of(plain.at_once()),
        greedy_match=comparison.match,
        largest_gap=comparison.largest_gap,
        tie_tolerance=tolerance,
        logit_change=change,
    )
    figures = with_new_answers(figures, request, answers, accepted)
    return CheckResult(vllm=figures, differing=comparison.differing)


def _tasks_of_methods(
    plain: Task, with_heads: Content, compared: Mapping[str, Content]
) -> list[Task]:
    """Return the tasks of plain decoding, the heads, and each other method, which is optional."""
    tasks = [plain, replace(plain, engine_args=with_heads, name="vLLM with the heads")]
    for name, config in compared.items():
        arguments = {"speculative_config": config}
        tasks.append(replace(plain, engine_args=arguments, name=f"vLLM, {name}", optional=True))
    return tasks


def accepted_per_position(accepted: Sequence[Sequence[int]], num_tokens: int) -> list[float]:
    """Compute the shares of steps that keep at least 1, 2, … `num_tokens` drafted tokens.

    A step that adds n tokens keeps n - 1 drafted tokens and one of the target's own, so that 1 plus
    the sum of the shares is the acceleration rate. There must be a step.
    """
    steps = [kept for answer in accepted for kept in answer]
    shares = []
    for depth in range(1, num_tokens + 1):
        shares.append(round(sum(kept > depth for kept in steps) / len(steps), 4))
    return shares


def drafting_arguments(request: CheckRequest) -> Content:
    """Return vLLM's arguments to draft with the checked heads."""
    if request.speculative_config is not None:
        return {"speculative_config": dict(request.speculative_config)}
    return read_layout(request.export).engine_args(request.export, request.target.model)


def with_expectations(
    found: VllmFigures, same_text: float | None, held_out: ChainLength | None
) -> VllmFigures:
    """Return vLLM's figures with the acceleration rates expected of its chain.

    Args:
        same_text: The chain's rate on the answers of native decoding, which vLLM is expected to
            reach up to ties; None if these were not decoded.
        held_out: The chain's rate on calibration's text; None if the prompts are of another kind.
    """
    if same_text is not None:
        found = replace(found, same_text_acceleration_rate=same_text)
    if held_out is None:
        return found
    rate = held_out.expected_acceleration_rate
    error = held_out.expected_standard_error
    new = replace(
        found.new or NewAnswers(answers=held_out.new.answers),
        expected_acceleration_rate=held_out.new.expected_acceleration_rate,
        expected_standard_error=held_out.new.expected_standard_error,
    )
    return replace(found, expected_acceleration_rate=rate, expected_standard_error=error, new=new)


def load_study(
    request: CheckRequest, gpus: int, progress: ProgressReporter = SILENT
) -> tuple[list[LoadRow], dict[str, str]]:
    """Measure vLLM's server under load, plain, with heads and by each compared method (`load`).

    Each number of concurrent requests is measured at least `check.repeats` times, in `SERVERS`
    servers, and gives one row for each method: the figures of its fastest pass.

    Returns:
        The rows, and why a compared method has none, by its name.
    """
    progress.begin("vLLM's server starts", 0, unit="loads")
    settings = request.settings
    task = LoadTask(
        request.target,
        [prompt.ids for prompt in request.prompts],
        settings.max_new_tokens,
        repeats=math.ceil(settings.repeats / SERVERS),
        gpus=gpus,
        levels=LEVELS,
    )
    compared = compared_configs(request)
    tasks = _tasks_of_methods(task, drafting_arguments(request), compared)
    plain, *others = serve_under_load(tasks, progress.report)
    assert not isinstance(plain, str), "it is not optional"
    rows = []
    failed = {}
    for name, figures in zip((HEADS, *compared), others, strict=True):
        if isinstance(figures, str):
            failed[name] = figures
        else:
            rows += load_rows(plain, figures, name)
    return rows, failed


def load_rows(
    plain: Sequence[LoadFigures],
    with_method: Sequence[LoadFigures],
    method: str = HEADS,
) -> list[LoadRow]:
    """Build the load study's rows of a method from its server's figures and the plain server's."""
    rows = []
    for before, after in zip(plain, with_method, strict=True):
        rows.append(
            LoadRow(
                method=method,
                requests=after.requests,
                range=range_of(after.speeds),
                baseline_range=range_of(before.speeds),
                speedup=rounded(after.speed / before.speed),
                acceleration_rate=after.acceleration_rate,
                tokens_per_second=rounded(after.speed),
                ttft_ms=_percentiles(after.ttft),
                tpot_ms=_percentiles(after.tpot),
                baseline_tokens_per_second=rounded(before.speed),
                baseline_ttft_ms=_percentiles(before.ttft),
                baseline_tpot_ms=_percentiles(before.tpot),
            )
        )
    return rows


def _percentiles(seconds: Sequence[float | None]) -> Percentiles:
    """Compute the 50th, 90th and 99th percentile of times, from seconds to milliseconds.

    A time of None is left out. Without times the percentiles are None.
    """
    times_N = 1000 * np.array([each for each in seconds if each is not None])
    if not len(times_N):
        return Percentiles()
    p50, p90, p99 = np.percentile(times_N, (50, 90, 99)).tolist()
    return Percentiles(p50=rounded(p50), p90=rounded(p90), p99=rounded(p99))
