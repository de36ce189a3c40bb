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
from dataclasses import dataclass
from functools import partial
from typing import Any

from pipeline.config import CheckConfig
from pipeline.decoding.acceptance import AcceptanceRule, RejectionSampling, greedy_acceptance
from pipeline.decoding.decoder import Decoded, Decoder, plain_decoder
from pipeline.evaluation.answers import (
    GreedyMatch,
    answer_lines,
    compare,
    mean_log_likelihood,
    samples,
    text_statistics,
    tie_tolerance,
    top_2_gap,
)
from pipeline.evaluation.baselines import baseline, beside_by_category
from pipeline.evaluation.overhead import fastest_threads
from pipeline.evaluation.prompts import CheckRequest, Prompt, rule_of
from pipeline.evaluation.speed import (
    ACCELERATED,
    PLAIN,
    Decode,
    Pass,
    by_category,
    decode_by,
    pace_beside,
    rate_on_new_answers,
    require_steps,
    speed,
    steps_by_accepted_length,
    take_turns,
)
from pipeline.evaluation.studies import run_studies
from pipeline.evaluation.tree_studies import chain_figures
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import read_heads
from pipeline.export.layout import read_layout
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import context_length, eos_token_ids, load_tokenizer

NUM_WARM_UPS = 2  # prompts


@dataclass(frozen=True)
class DecodingMethods:
    """What is compared: plain decoding, decoding with the heads, and transformers' baselines by
    name.
    """

    plain: Decoder
    accelerated: Decoder
    baselines: Mapping[str, Decode]


@dataclass(frozen=True)
class Measurement:
    """Decoded answers: each repetition by the rule; each greedy one, baselines included; why
    baselines failed.
    """

    passes: list[Pass]
    greedy_passes: list[Pass]
    failed: dict[str, str]

    @property
    def plain_greedy(self) -> list[list[int]]:
        return _texts(self.greedy_passes[0][PLAIN])


def check_native(request: CheckRequest, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Decode every prompt plainly, with the tree and by the baselines.

    Returns:
        `native` and `target_text` of report.json, `samples` for its drawing, `answers` as the lines
        of one file per method, and the `differing` sequences that are not ties.

    Raises:
        ConfigError: No answer took a step.
    """
    settings, prompts = request.settings, request.prompts
    repetitions = settings.repeats + (rule_of(settings) is not greedy_acceptance)
    progress = progress or ProgressReporter()
    times = f", {repetitions} times each" if repetitions > 1 else ""
    progress.begin(f"native{times}", len(prompts) * repetitions)
    methods, layout = load_methods(request), read_layout(request.export)
    plain, accelerated = methods.plain, methods.accelerated
    endless = plain_decoder(plain.model, eos_token_ids=(), max_length=plain.max_length)
    with fastest_threads(endless, prompts[0].ids) as threads:
        measured = measure(methods, prompts, settings, progress)
        calibration, answers = request.calibration, measured.plain_greedy
        chain = chain_figures(accelerated, prompts, answers, layout.num_speculative_tokens)
        studies = run_studies(
            settings.studies, plain, accelerated, prompts, settings, calibration, answers, progress
        )
    match = greedy_match(request, methods, measured, ACCELERATED)
    tokenizer = load_tokenizer(request.target)
    return {
        "native": native_figures(request, methods, measured, match)
        | {"chain": chain, **({} if request.gpus else {"threads": threads})}
        | ({"studies": studies} if studies else {}),
        "target_text": text_statistics(plain.model, prompts, answers),
        "samples": samples(tokenizer, prompts, measured.passes[0][ACCELERATED]),
        "answers": {
            name: answer_lines(
                f"{request.name}-{name}", tokenizer, prompts, [one[side] for one in measured.passes]
            )
            for side, name in ((PLAIN, PLAIN), (ACCELERATED, layout.shape.kind))
        },
        "differing": match.differing,
    }


def load_methods(request: CheckRequest) -> DecodingMethods:
    """The target, loaded once, behind every method."""
    target, settings = request.target, request.settings
    model = load_causal_lm(target, "cuda" if request.gpus else "cpu", max(1, request.gpus))
    heads = read_heads(request.export, model).to(input_device(model))
    eos, room = eos_token_ids(target), context_length(target)
    return DecodingMethods(
        plain_decoder(model, eos_token_ids=eos, max_length=room),
        Decoder(model, heads, request.tree, eos_token_ids=eos, max_length=room),
        {
            kind: baseline(kind, model, eos, settings.max_new_tokens, request.assistant)
            for kind in settings.baselines
        },
    )


def measure(
    methods: DecodingMethods,
    prompts: Sequence[Prompt],
    settings: CheckConfig,
    progress: ProgressReporter | None = None,
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
    both_greedy = _both_sides(methods, greedy_acceptance, settings.max_new_tokens)
    baselines = dict(methods.baselines)
    take_turns(by_rule | baselines, prompts[:NUM_WARM_UPS], failed)
    if (
        methods.plain.captures or methods.accelerated.captures
    ):  # capture the graphs of every length, untimed
        take_turns(by_rule, prompts)
        if rule is not greedy_acceptance:
            take_turns(both_greedy, prompts)
    greedily = both_greedy | baselines
    if rule is greedy_acceptance:
        passes = greedy_passes = [
            take_turns(greedily, prompts, failed, progress) for _ in range(settings.repeats)
        ]
    else:
        passes = [take_turns(by_rule, prompts, progress=progress) for _ in range(settings.repeats)]
        greedy_passes = [take_turns(greedily, prompts, failed, progress)]
    require_steps(answer.accepted for answer in passes[0][ACCELERATED])
    return Measurement(passes, greedy_passes, failed)


def greedy_match(
    request: CheckRequest, methods: DecodingMethods, measured: Measurement, method: str
) -> GreedyMatch:
    """A method's greedy answers against plain decoding's."""
    answers = _texts(measured.greedy_passes[0][method])
    gap_at = partial(top_2_gap, methods.plain.model)
    return compare(request.prompts, measured.plain_greedy, answers, gap_at, _tolerance(request))


def _tolerance(request: CheckRequest) -> float:
    return tie_tolerance(request.target, request.settings, on_gpu=request.gpus > 0)


def native_figures(
    request: CheckRequest, methods: DecodingMethods, measured: Measurement, match: GreedyMatch
) -> dict[str, Any]:
    """`check.native` of report.json, without the studies."""
    settings, first = request.settings, measured.passes[0]
    beside = [
        {
            "name": name,
            **pace_beside(measured.greedy_passes, name),
            "greedy_match": greedy_match(request, methods, measured, name).as_dict(),
        }
        for name in methods.baselines
        if name not in measured.failed
    ]
    figures = {
        **speed(request.prompts, measured.passes),
        "greedy_match": match.as_dict(),
        "tie_tolerance": _tolerance(request),
        **match.largest_gap(),
        "accepted_lengths": steps_by_accepted_length(first[ACCELERATED]),
        "prompts": len(request.prompts),
        "repeats": settings.repeats,
        **_rule_facts(settings, first),
        "categories": beside_by_category(
            by_category(request.prompts, measured.passes),
            request.prompts,
            measured.greedy_passes,
            [name for name in methods.baselines if name not in measured.failed],
        ),
        "baselines": beside
        + [{"name": name, "failed": reason} for name, reason in measured.failed.items()],
    }
    if request.trained is not None:
        answers = first[ACCELERATED]
        accepted = [answer.accepted for answer in answers]
        figures |= rate_on_new_answers(
            request.prompts, _texts(answers), accepted, request.trained.answers()
        )
    if settings.acceptance != "greedy":
        figures["log_likelihood"] = _log_likelihoods(request, methods, measured)
    return figures


def _both_sides(
    methods: DecodingMethods, rule: AcceptanceRule, num_tokens: int
) -> dict[str, Decode]:
    """Both sides by the same rule; where it samples, both draw from the same seed."""
    sides = {PLAIN: methods.plain, ACCELERATED: methods.accelerated}
    return {name: decode_by(decoder, rule, num_tokens) for name, decoder in sides.items()}


def _log_likelihoods(
    request: CheckRequest, methods: DecodingMethods, measured: Measurement
) -> dict[str, float]:
    """The target's log-likelihood of greedy text, of plain sampling and of the rule's text."""
    settings, prompts, model = request.settings, request.prompts, methods.plain.model
    sampled, by_rule = measured.passes[0][PLAIN], measured.passes[0][ACCELERATED]
    if not rule_of(
        settings
    ).samples:  # typical acceptance with a greedy first token is deterministic
        sampling = decode_by(
            methods.plain, RejectionSampling(settings.temperature), settings.max_new_tokens
        )
        sampled = take_turns({PLAIN: sampling}, prompts)[PLAIN]
    written = {
        "greedy": measured.plain_greedy,
        "sampling": _texts(sampled),
        settings.acceptance: _texts(by_rule),
    }
    return {
        name: round(mean_log_likelihood(model, prompts, answers), 4)
        for name, answers in written.items()
    }


def _rule_facts(settings: CheckConfig, decoded: Pass) -> dict[str, Any]:
    """The rule and its numbers; for rejection sampling, how many texts equal those of plain
    sampling.
    """
    if settings.acceptance == "greedy":
        return {"acceptance": "greedy"}
    facts: dict[str, Any] = {"acceptance": settings.acceptance, "temperature": settings.temperature}
    if settings.acceptance == "typical":
        rule = {"eps": settings.typical_eps, "delta": settings.typical_delta}
        return facts | rule | {"first_token": settings.first_token}
    facts["top_p"] = settings.top_p
    if settings.acceptance == "rejection":
        sides = zip(_texts(decoded[PLAIN]), _texts(decoded[ACCELERATED]), strict=True)
        facts["sampled_identical"] = sum(left == right for left, right in sides)
    return facts


def _texts(decoded: Sequence[Decoded]) -> list[list[int]]:
    return [one.token_ids for one in decoded]
