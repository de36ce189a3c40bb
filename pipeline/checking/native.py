"""The export decoded by our own tree decoder on plain transformers, against plain decoding in the same process.

Both decoders are the same loop with the same cache, one with the tree and one without, and take turns prompt by
prompt, so that a machine that drifts slows both. Seconds are decoding alone, the prefill apart. Plain decoding follows
the same rule, greedily or sampled from the same seeds, but greedy text is always compared too.

    acceleration rate  tokens kept / target forwards after the prefill, pooled over sequences
    overhead           seconds per Medusa step / seconds per plain step
    speedup            acceleration rate / overhead
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from pipeline.checking.comparison import compare, gap_of, tie_tolerance
from pipeline.checking.prompts import Prompt
from pipeline.checkpoints.medusa import read_export
from pipeline.config import CheckConfig
from pipeline.conversations.quality import distinct_n
from pipeline.errors import ConfigError
from pipeline.medusa.acceptance import AcceptanceRule, acceptance_rule, greedy_acceptance
from pipeline.medusa.decoding import Decoded, MedusaDecoder, acceleration_rate, plain_decoder
from pipeline.medusa.heads import HeadsConfig, MedusaHeads, from_named_tensors
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids, load_tokenizer

NUM_SAMPLES = 2  # decoded answers that the report shows


@dataclass(frozen=True)
class Pass:
    """All prompts once: what plain decoding and the tree wrote."""

    plain: list[Decoded]
    medusa: list[Decoded]


def check_native(
    target: TargetSpec,
    export: str,
    prompts: list[Prompt],
    settings: CheckConfig,
    choices: list[tuple[int, ...]],
    gpus: int,
) -> dict[str, Any]:
    """Decode every prompt plainly and with the tree.

    Returns:
        `native` and `target_text` of report.json, `samples` for its drawing, and the `differing` sequences that are
        not ties.

    Raises:
        ConfigError: No answer took a step.
    """
    model = load_causal_lm(target, "cuda" if gpus else "cpu", max(1, gpus))
    heads = load_exported_heads(export).to(input_device(model))
    eos, room = eos_token_ids(target), context_length(target)
    plain = plain_decoder(model, eos_token_ids=eos, max_length=room)
    medusa = MedusaDecoder(model, heads, choices, eos_token_ids=eos, max_length=room)
    rule = acceptance_rule(
        settings.acceptance,
        settings.temperature,
        settings.typical_eps,
        settings.typical_delta,
        settings.top_p,
        settings.first_token,
    )

    _decode_all(plain, medusa, prompts[:2], 16, rule)  # warm-up
    passes = [_decode_all(plain, medusa, prompts, settings.max_new_tokens, rule) for _ in range(settings.repeats)]
    first = passes[0]
    if not any(decoded.num_steps for decoded in first.medusa):
        raise ConfigError(
            "Every answer ended with its first token, so that there is no step to measure.",
            "check.max_new_tokens",
            "Raise it, or check with other prompts.",
        )
    greedy = (
        first
        if rule is greedy_acceptance
        else _decode_all(plain, medusa, prompts, settings.max_new_tokens, greedy_acceptance)
    )
    plain_ids, greedy_ids = _texts(greedy.plain), _texts(greedy.medusa)
    tolerance = tie_tolerance(target, settings)
    match = compare([p.id for p in prompts], [p.ids for p in prompts], plain_ids, greedy_ids, gap_of(model), tolerance)
    return {
        "native": {
            **speed(passes),
            "greedy_match": match.as_dict(),
            "tie_tolerance": tolerance,
            "accepted_lengths": _histogram(first.medusa),
            "prompts": len(prompts),
            **_rule_facts(settings, first),
        },
        "target_text": text_statistics(model, prompts, plain_ids),
        "samples": samples(load_tokenizer(target), prompts, first.medusa),
        "differing": match.differing,
    }


def load_exported_heads(export: str) -> MedusaHeads:
    """The heads as the export's own files have them."""
    config, tensors = read_export(export)
    shape = HeadsConfig(config.hidden_size, config.vocab_size, config.num_heads, config.num_layers, config.tied)
    return from_named_tensors(shape, tensors, where=export)


def speed(passes: Sequence[Pass]) -> dict[str, float]:
    """The figures that the field compares; seconds are medians over repetitions."""

    def of(side: Callable[[Pass], list[Decoded]]) -> tuple[float, int, float]:
        seconds = statistics.median(sum(decoded.seconds for decoded in side(one)) for one in passes)
        steps = sum(decoded.num_steps for decoded in side(passes[0]))
        return seconds, steps, sum(sum(decoded.accepted) for decoded in side(passes[0])) / seconds

    plain_seconds, plain_steps, plain_rate = of(lambda one: one.plain)
    medusa_seconds, medusa_steps, medusa_rate = of(lambda one: one.medusa)
    acceleration = acceleration_rate(passes[0].medusa)
    overhead = (medusa_seconds / medusa_steps) / (plain_seconds / plain_steps)
    first_token = statistics.median(decoded.seconds_prefill for one in passes for decoded in one.medusa)
    return {
        "acceleration_rate": round(acceleration, 4),
        "overhead": round(overhead, 4),
        "speedup": round(acceleration / overhead, 4),
        "tokens_per_second": round(medusa_rate, 2),
        "baseline_tokens_per_second": round(plain_rate, 2),
        "time_to_first_token": round(first_token, 5),
    }


@torch.inference_mode()
def text_statistics(
    model: PreTrainedModel, prompts: Sequence[Prompt], answers: Sequence[list[int]]
) -> dict[str, float]:
    """How varied plain greedy answers are, and how sure the target is: its mean entropy where it chose their tokens."""
    entropies = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt.ids + answer[:-1]], device=input_device(model))
        logits_TV = model(input_ids=ids, use_cache=False).logits[0, len(prompt.ids) - 1 :].float()
        entropies += torch.special.entr(logits_TV.softmax(-1)).sum(-1).tolist()
    distinct = statistics.fmean(distinct_n(answer, 4) for answer in answers)
    return {"distinct_4": round(distinct, 4), "mean_entropy_nats": round(statistics.fmean(entropies), 4)}


def samples(tokenizer: Any, prompts: Sequence[Prompt], decoded: Sequence[Decoded]) -> list[dict[str, Any]]:
    """A few answers, each token with the step that produced it (0: the prefill)."""
    shown = []
    for prompt, answer in list(zip(prompts, decoded, strict=True))[:NUM_SAMPLES]:
        steps = [0] + [step for step, kept in enumerate(answer.accepted, start=1) for _ in range(kept)]
        texts, before = [], ""
        for end in range(1, len(answer.token_ids) + 1):
            text = tokenizer.decode(answer.token_ids[:end], skip_special_tokens=True)
            whole = "" if text.endswith("\N{REPLACEMENT CHARACTER}") else text[len(before) :]
            texts.append(whole)
            before += whole
        question = tokenizer.decode(prompt.ids, skip_special_tokens=True)
        shown.append(
            {"prompt": question, "tokens": [{"text": t, "step": s} for t, s in zip(texts, steps, strict=True)]}
        )
    return shown


def _decode_all(
    plain: MedusaDecoder, medusa: MedusaDecoder, prompts: Sequence[Prompt], num_tokens: int, rule: AcceptanceRule
) -> Pass:
    """Both sides by the same rule; where it samples, both draw from the same seed, which is the prompt's number."""
    device = input_device(plain.model)
    one = Pass([], [])
    for seed, prompt in enumerate(prompts):
        for decoder, decoded in ((plain, one.plain), (medusa, one.medusa)):
            generator = torch.Generator(device).manual_seed(seed) if rule.samples else None
            decoded.append(decoder.generate(prompt.ids, num_tokens, rule, generator))
    return one


def _rule_facts(settings: CheckConfig, decoded: Pass) -> dict[str, Any]:
    """The rule and its numbers; of rejection sampling, how many texts are those that plain sampling draws."""
    if settings.acceptance == "greedy":
        return {"acceptance": "greedy"}
    facts: dict[str, Any] = {"acceptance": settings.acceptance, "temperature": settings.temperature}
    if settings.acceptance == "typical":
        return facts | {"first_token": settings.first_token}
    facts["top_p"] = settings.top_p
    if settings.acceptance == "rejection":
        equal = sum(left == right for left, right in zip(_texts(decoded.plain), _texts(decoded.medusa), strict=True))
        facts["sampled_identical"] = equal
    return facts


def _texts(decoded: Sequence[Decoded]) -> list[list[int]]:
    return [one.token_ids for one in decoded]


def _histogram(decoded: Sequence[Decoded]) -> list[int]:
    """How many steps kept 0, 1, 2, … guesses beside the target's own token."""
    counts = Counter(max(0, kept - 1) for one in decoded for kept in one.accepted)
    return [counts[length] for length in range(max(counts, default=0) + 1)]
