"""The native check: the export decoded by our tree decoder on plain transformers, against plain
decoding.

Both sides are the same decoder with the same cache, one with the tree and one without. They decode
prompt by prompt in turn, after a warm-up, on the number of CPU threads at which plain decoding is
fastest. Plain decoding follows the same acceptance rule, greedily or sampled from the same seeds;
greedy text is compared in any case. transformers' own decoding of the same prompts is measured
beside it (`check.baselines`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeline.artifacts.check_result import (
    Baseline,
    CheckResult,
    Line,
    NativeFigures,
)
from pipeline.config import CheckConfig
from pipeline.decoding.acceptance import AcceptanceRule, RejectionSampling, greedy_acceptance
from pipeline.decoding.decoder import Decoded, Decoder, plain_decoder
from pipeline.evaluation.answers import (
    Comparison,
    answer_lines,
    compare,
    mean_log_likelihood,
    samples,
    text_statistics,
    tie_tolerance,
    top_2_gap,
)
from pipeline.evaluation.overhead import fastest_threads
from pipeline.evaluation.prompts import SILENT, CheckRequest, Prompt, rule_of
from pipeline.evaluation.speed import (
    ACCELERATED,
    PLAIN,
    Decode,
    Pass,
    baseline,
    baseline_figures,
    by_category,
    decode_by,
    rate_on_new_answers,
    require_steps,
    speed,
    steps_by_accepted_length,
    take_turns,
)
from pipeline.evaluation.studies import chain_rate, run_studies
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import read_heads
from pipeline.export.layout import read_layout
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import context_length, eos_token_ids, load_tokenizer

NUM_WARM_UPS = 2  # prompts


@dataclass(frozen=True)
class DecodingMethods:
    """Plain decoding, decoding with the heads, and transformers' baselines by name."""

    plain: Decoder
    accelerated: Decoder
    baselines: Mapping[str, Decode]


@dataclass(frozen=True)
class Measurement:
    """Decoded answers: each repetition by the rule, each greedy one with the baselines, and why
    baselines failed.
    """

    passes: list[Pass]
    greedy_passes: list[Pass]
    failed: dict[str, str]

    def greedy_texts(self, method: str) -> list[list[int]]:
        return _texts(self.greedy_passes[0][method])


def check_native(
    request: CheckRequest, progress: ProgressReporter = SILENT
) -> tuple[CheckResult, dict[str, list[Line]]]:
    """Decode every prompt plainly, with the tree and by the baselines.

    Returns:
        The native part of a check, and the answers of plain decoding and of the heads.

    Raises:
        ConfigError: No answer took a step.
    """
    settings, prompts = request.settings, request.prompts
    repetitions = settings.repeats
    if rule_of(settings) is not greedy_acceptance:
        repetitions += 1
    times = f", {repetitions} times each" if repetitions > 1 else ""
    progress.begin(f"native{times}", len(prompts) * repetitions)
    methods, layout = load_methods(request), read_layout(request.export)
    plain, accelerated = methods.plain, methods.accelerated
    endless = plain_decoder(plain.model, eos_token_ids=(), max_length=plain.max_length)
    with fastest_threads(endless, prompts[0].ids) as threads:
        measured = measure(methods, prompts, settings, progress)
        greedy = measured.greedy_texts(PLAIN)
        chain = chain_rate(accelerated, prompts, greedy, layout.num_speculative_tokens)
        studies = run_studies(
            settings, plain, accelerated, prompts, greedy, request.calibration, progress
        )
    comparison = compare_greedy(request, methods, measured, ACCELERATED)
    figures = native_figures(request, methods, measured, comparison)
    figures = replace(figures, chain=chain, studies=studies)
    if not request.gpus:
        figures = replace(figures, threads=threads)
    tokenizer = load_tokenizer(request.target)
    answers = {}
    for side, name in ((PLAIN, PLAIN), (ACCELERATED, layout.shape.kind)):
        written = [one[side] for one in measured.passes]
        answers[name] = answer_lines(f"{request.name}-{name}", tokenizer, prompts, written)
    result = CheckResult(
        native=figures,
        target_text=text_statistics(plain.model, prompts, greedy),
        samples=samples(tokenizer, prompts, measured.passes[0][ACCELERATED]),
        differing=comparison.differing,
    )
    return result, answers


def load_methods(request: CheckRequest) -> DecodingMethods:
    """The target, loaded once, behind every method."""
    target, settings = request.target, request.settings
    model = load_causal_lm(target, "cuda" if request.gpus else "cpu", max(1, request.gpus))
    heads = read_heads(request.export, model).to(input_device(model))
    eos, room = eos_token_ids(target), context_length(target)
    baselines: dict[str, Decode] = {}
    for name in settings.baselines:
        baselines[name] = baseline(name, model, eos, settings.max_new_tokens, request.assistant)
    return DecodingMethods(
        plain_decoder(model, eos_token_ids=eos, max_length=room),
        Decoder(model, heads, request.tree, eos_token_ids=eos, max_length=room),
        baselines,
    )


def measure(
    methods: DecodingMethods,
    prompts: Sequence[Prompt],
    settings: CheckConfig,
    progress: ProgressReporter,
) -> Measurement:
    """Decode every prompt by every method, after a warm-up. Under a sampling rule, greedy text is
    decoded once.

    A baseline that fails on any prompt is left out from there on; the other methods continue.

    Raises:
        ConfigError: No answer took a step.
    """
    failed: dict[str, str] = {}
    rule = rule_of(settings)
    by_rule = _both_sides(methods, rule, settings.max_new_tokens)
    greedily = _both_sides(methods, greedy_acceptance, settings.max_new_tokens)
    take_turns({**by_rule, **methods.baselines}, prompts[:NUM_WARM_UPS], failed)
    if methods.plain.captures or methods.accelerated.captures:
        take_turns(by_rule, prompts)  # captures the graphs of every length, untimed
        if rule is not greedy_acceptance:
            take_turns(greedily, prompts)
    greedily.update(methods.baselines)
    passes: list[Pass] = []
    if rule is greedy_acceptance:
        for _ in range(settings.repeats):
            passes.append(take_turns(greedily, prompts, failed, progress))
        greedy_passes = passes
    else:
        for _ in range(settings.repeats):
            passes.append(take_turns(by_rule, prompts, progress=progress))
        greedy_passes = [take_turns(greedily, prompts, failed, progress)]
    require_steps(answer.accepted for answer in passes[0][ACCELERATED])
    return Measurement(passes, greedy_passes, failed)


def compare_greedy(
    request: CheckRequest, methods: DecodingMethods, measured: Measurement, method: str
) -> Comparison:
    """A method's greedy answers against plain decoding's."""
    plain, answers = measured.greedy_texts(PLAIN), measured.greedy_texts(method)
    gap_at = partial(top_2_gap, methods.plain.model)
    return compare(request.prompts, plain, answers, gap_at, _tolerance(request))


def _tolerance(request: CheckRequest) -> float:
    return tie_tolerance(request.target, request.settings, on_gpu=request.gpus > 0)


def native_figures(
    request: CheckRequest, methods: DecodingMethods, measured: Measurement, comparison: Comparison
) -> NativeFigures:
    """`check.native` of report.json, without the chain and the studies."""
    settings, prompts, passes = request.settings, request.prompts, measured.passes
    decoded = passes[0][ACCELERATED]
    baselines, failed = [], []
    for name in methods.baselines:
        if name in measured.failed:
            failed.append(Baseline(name=name, failed=measured.failed[name]))
            continue
        match = compare_greedy(request, methods, measured, name).match
        figures = baseline_figures(measured.greedy_passes, name)
        baselines.append(replace(figures, greedy_match=match))
    names = [each.name for each in baselines]
    found = NativeFigures(
        **vars(speed(prompts, passes)),
        greedy_match=comparison.match,
        largest_gap=comparison.largest_gap,
        tie_tolerance=_tolerance(request),
        dtype=request.target.dtype,
        accepted_lengths=steps_by_accepted_length(decoded),
        prompts=len(prompts),
        repeats=settings.repeats,
        acceptance=settings.acceptance,
        categories=by_category(prompts, passes, measured.greedy_passes, names),
        baselines=baselines + failed,
    )
    if request.trained is not None:
        accepted = [answer.accepted for answer in decoded]
        seen_share, new = rate_on_new_answers(
            prompts, _texts(decoded), accepted, request.trained.answers()
        )
        found = replace(found, seen_share=seen_share, new=new)
    if settings.acceptance != "greedy":
        likelihoods = _log_likelihoods(request, methods, measured)
        found = replace(found, temperature=settings.temperature, log_likelihood=likelihoods)
    if settings.acceptance == "typical":
        found = replace(
            found,
            eps=settings.typical_eps,
            delta=settings.typical_delta,
            first_token=settings.first_token,
        )
    elif settings.acceptance == "rejection":
        pairs = zip(_texts(passes[0][PLAIN]), _texts(decoded), strict=True)
        same = sum(left == right for left, right in pairs)
        found = replace(found, top_p=settings.top_p, sampled_identical=same)
    return found


def _both_sides(
    methods: DecodingMethods, rule: AcceptanceRule, num_tokens: int
) -> dict[str, Decode]:
    """Both sides by the same rule; where it samples, both draw from the same seed."""
    return {
        PLAIN: decode_by(methods.plain, rule, num_tokens),
        ACCELERATED: decode_by(methods.accelerated, rule, num_tokens),
    }


def _log_likelihoods(
    request: CheckRequest, methods: DecodingMethods, measured: Measurement
) -> dict[str, float]:
    """The target's log-likelihood of greedy text, of plain sampling and of the rule's text."""
    settings, prompts, model = request.settings, request.prompts, methods.plain.model
    sampled = measured.passes[0][PLAIN]
    if not rule_of(settings).samples:  # typical acceptance with a greedy first token
        rule = RejectionSampling(settings.temperature)
        sampling = decode_by(methods.plain, rule, settings.max_new_tokens)
        sampled = take_turns({PLAIN: sampling}, prompts)[PLAIN]
    written = {
        "greedy": measured.greedy_texts(PLAIN),
        "sampling": _texts(sampled),
        settings.acceptance: _texts(measured.passes[0][ACCELERATED]),
    }
    found = {}
    for name, answers in written.items():
        found[name] = round(mean_log_likelihood(model, prompts, answers), 4)
    return found


def _texts(decoded: Sequence[Decoded]) -> list[list[int]]:
    return [one.token_ids for one in decoded]
