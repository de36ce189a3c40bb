"""The export decoded by our own tree decoder on plain transformers, against plain decoding in the same process.

Both decoders are the same loop with the same cache, one with the tree and one without. They take turns prompt by
prompt, after a warm-up, on as many CPU threads as make plain decoding fastest. Plain decoding follows the same rule,
greedily or sampled from the same seeds, but greedy text is always compared too, and what transformers itself makes of
the prompts is measured beside it (`check.baselines`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.config import CheckConfig
from pipeline.decoding.acceptance import AcceptanceRule, RejectionSampling, greedy_acceptance
from pipeline.decoding.decoder import Decoded, Decoder, plain_decoder
from pipeline.errors import ConfigError
from pipeline.evaluation.answers import answer_lines, samples
from pipeline.evaluation.baselines import baseline
from pipeline.evaluation.comparison import GreedyMatch, compare, gap_of, tie_tolerance
from pipeline.evaluation.overhead import fastest_threads
from pipeline.evaluation.prompts import Prompt, rule_of
from pipeline.evaluation.quality import mean_log_likelihood, text_statistics
from pipeline.evaluation.speed import (
    MEDUSA,
    PLAIN,
    Decode,
    Pass,
    accepted_lengths,
    by_category,
    pace_beside,
    speed,
    take_turns,
)
from pipeline.evaluation.studies import run_studies
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import read_export
from pipeline.heads.medusa import MedusaHeads, MedusaShape
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids, load_tokenizer

NUM_WARM_UPS = 2  # prompts


def check_native(
    target: TargetSpec,
    export: str,
    prompts: list[Prompt],
    settings: CheckConfig,
    choices: list[tuple[int, ...]],
    gpus: int,
    name: str = "target",
    assistant: TargetSpec | None = None,
    calibration: Mapping[str, Any] | None = None,
    progress: ProgressReporter | None = None,
) -> dict[str, Any]:
    """Decode every prompt plainly, with the tree and by the baselines.

    Args:
        name: The target's in the files of answers: `NAME-plain` and `NAME-medusa`.
        assistant: The model behind the baseline of that name.
        calibration: The calibrate stage's tree.json, for the studies.
        progress: Is told how far it is.

    Returns:
        `native` and `target_text` of report.json, `samples` for its drawing, `answers` as the lines of a file per
        method, and the `differing` sequences that are not ties.

    Raises:
        ConfigError: No answer took a step.
    """
    progress = progress or ProgressReporter()
    times = f", {num_passes(settings)} times each" if num_passes(settings) > 1 else ""
    progress.begin(f"native{times}", len(prompts) * num_passes(settings))
    model = load_causal_lm(target, "cuda" if gpus else "cpu", max(1, gpus))
    heads = load_exported_heads(export).to(input_device(model))
    eos, room = eos_token_ids(target), context_length(target)
    plain = plain_decoder(model, eos_token_ids=eos, max_length=room)
    medusa = Decoder(model, heads, choices, eos_token_ids=eos, max_length=room)
    others: dict[str, Decode] = {
        kind: baseline(kind, model, eos, settings.max_new_tokens, assistant) for kind in settings.baselines
    }
    with fastest_threads(plain_decoder(model, eos_token_ids=(), max_length=room), prompts[0].ids):
        measurement = measure(plain, medusa, others, prompts, settings, progress)
        first, greedy = measurement.passes[0], measurement.greedy_passes[0]
        plain_ids = _texts(greedy[PLAIN])
        studies = run_studies(
            settings.studies, plain, medusa, prompts, settings, calibration or {}, plain_ids, progress
        )
    tolerance, gap_at = tie_tolerance(target, settings), gap_of(model)
    names, prompt_ids = [prompt.id for prompt in prompts], [prompt.ids for prompt in prompts]

    def matched(method: str) -> GreedyMatch:
        return compare(names, prompt_ids, plain_ids, _texts(greedy[method]), gap_at, tolerance)

    match, tokenizer = matched(MEDUSA), load_tokenizer(target)
    measured = [
        {"name": method, **pace_beside(measurement.greedy_passes, method), "greedy_match": matched(method).as_dict()}
        for method in others
        if method not in measurement.failed
    ]
    native = {
        **speed(measurement.passes),
        "greedy_match": match.as_dict(),
        "tie_tolerance": tolerance,
        "accepted_lengths": accepted_lengths(first[MEDUSA]),
        "prompts": len(prompts),
        "repeats": settings.repeats,
        **_rule_facts(settings, first),
        "categories": by_category(prompts, measurement.passes),
        "baselines": measured + [{"name": method, "failed": reason} for method, reason in measurement.failed.items()],
    }
    if studies:
        native["studies"] = studies
    if settings.acceptance != "greedy":
        native["log_likelihood"] = _log_likelihoods(model, prompts, settings, plain, first, plain_ids)
    return {
        "native": native,
        "target_text": text_statistics(model, prompts, plain_ids),
        "samples": samples(tokenizer, prompts, first[MEDUSA]),
        "answers": {
            method: answer_lines(f"{name}-{method}", tokenizer, prompts, [one[method] for one in measurement.passes])
            for method in (PLAIN, MEDUSA)
        },
        "differing": match.differing,
    }


@dataclass(frozen=True)
class Measurement:
    """What was written: every repetition by the rule; greedily, where the baselines take part; why some could not."""

    passes: list[Pass]
    greedy_passes: list[Pass]
    failed: dict[str, str]


def measure(
    plain: Decoder,
    medusa: Decoder,
    others: Mapping[str, Decode],
    prompts: Sequence[Prompt],
    settings: CheckConfig,
    progress: ProgressReporter | None = None,
) -> Measurement:
    """Let everyone decode every prompt, warmed up. Under a rule that is not greedy, greedy text is written once.

    One of the others that fails, at the first prompt or the last, is out and spoils nothing for those that go on.

    Raises:
        ConfigError: No answer took a step.
    """
    rule, num_tokens = rule_of(settings), settings.max_new_tokens
    failed: dict[str, str] = {}
    by_rule = _methods(plain, medusa, rule, num_tokens)
    greedily = _methods(plain, medusa, greedy_acceptance, num_tokens) | dict(others)
    take_turns(by_rule | dict(others), prompts[:NUM_WARM_UPS], failed)
    if plain.captures or medusa.captures:  # once at every length, untimed
        take_turns(by_rule, prompts)
        if rule is not greedy_acceptance:
            take_turns(_methods(plain, medusa, greedy_acceptance, num_tokens), prompts)
    if rule is greedy_acceptance:
        passes = greedy_passes = [take_turns(greedily, prompts, failed, progress) for _ in range(settings.repeats)]
    else:
        passes = [take_turns(by_rule, prompts, progress=progress) for _ in range(settings.repeats)]
        greedy_passes = [take_turns(greedily, prompts, failed, progress)]
    if not any(answer.num_steps for answer in passes[0][MEDUSA]):
        raise ConfigError(
            "Every answer ended with its first token, so that there is no step to measure.",
            "check.max_new_tokens",
            "Raise it, or check with other prompts.",
        )
    return Measurement(passes, greedy_passes, failed)


def num_passes(settings: CheckConfig) -> int:
    """How often a measurement asks every prompt."""
    return settings.repeats + (rule_of(settings) is not greedy_acceptance)


def load_exported_heads(export: str) -> MedusaHeads:
    """The heads as the export's own files have them."""
    config, tensors = read_export(export)
    shape = MedusaShape(config.hidden_size, config.vocab_size, config.num_heads, config.num_layers, config.tied)
    return MedusaHeads._filled(shape, lambda heads: heads.exported_tensors("expanded"), tensors, export)


def _methods(plain: Decoder, medusa: Decoder, rule: AcceptanceRule, num_tokens: int) -> dict[str, Decode]:
    """Both sides by the same rule; where it samples, both draw from the same seed."""
    device = input_device(plain.model)

    def by(decoder: Decoder) -> Decode:
        def decode(prompt_ids: list[int], seed: int) -> Decoded:
            generator = torch.Generator(device).manual_seed(seed) if rule.samples else None
            return decoder.generate(prompt_ids, num_tokens, rule, generator)

        return decode

    return {PLAIN: by(plain), MEDUSA: by(medusa)}


def _log_likelihoods(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    settings: CheckConfig,
    plain: Decoder,
    first: Pass,
    plain_ids: Sequence[list[int]],
) -> dict[str, float]:
    """How likely the target finds greedy text, what plain sampling draws, and the rule's text."""
    sampled = first[PLAIN]
    if not rule_of(settings).samples:  # typical acceptance with a greedy first token is deterministic
        sampling = _methods(plain, plain, RejectionSampling(settings.temperature), settings.max_new_tokens)
        sampled = take_turns({PLAIN: sampling[PLAIN]}, prompts)[PLAIN]
    written = {"greedy": plain_ids, "sampling": _texts(sampled), settings.acceptance: _texts(first[MEDUSA])}
    return {name: round(mean_log_likelihood(model, prompts, answers), 4) for name, answers in written.items()}


def _rule_facts(settings: CheckConfig, decoded: Pass) -> dict[str, Any]:
    """The rule and its numbers; of rejection sampling, how many texts are those that plain sampling draws."""
    if settings.acceptance == "greedy":
        return {"acceptance": "greedy"}
    facts: dict[str, Any] = {"acceptance": settings.acceptance, "temperature": settings.temperature}
    if settings.acceptance == "typical":
        rule = {"eps": settings.typical_eps, "delta": settings.typical_delta}
        return facts | rule | {"first_token": settings.first_token}
    facts["top_p"] = settings.top_p
    if settings.acceptance == "rejection":
        sides = zip(_texts(decoded[PLAIN]), _texts(decoded[MEDUSA]), strict=True)
        facts["sampled_identical"] = sum(left == right for left, right in sides)
    return facts


def _texts(decoded: Sequence[Decoded]) -> list[list[int]]:
    return [one.token_ids for one in decoded]
