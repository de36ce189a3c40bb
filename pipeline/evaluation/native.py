"""The native check: decode with an export's heads on transformers, and compare with plain decoding.

Decoding with heads and plain decoding use the same kind of decoder and cache, with the tree or
without it. After a warm-up they take turns for each prompt, on the number of CPU threads at which
plain decoding is fastest. Both follow the same acceptance rule, and a rule that samples draws from
the same seeds. Greedy answers are compared under every rule. The baselines (`check.baselines`)
decode the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from pipeline.artifacts.check_result import (
    Baseline,
    CheckResult,
    NativeFigures,
)
from pipeline.artifacts.json_form import rounded
from pipeline.decoding.acceptance import greedy_acceptance
from pipeline.decoding.decoder import Decoded, Decoder, plain_decoder
from pipeline.decoding.held_out import replay
from pipeline.decoding.tree import cartesian_tree
from pipeline.evaluation.answer_ranks import answer_ranks
from pipeline.evaluation.answers import AnswerLines, answer_lines, samples
from pipeline.evaluation.drafted import RETRIEVAL, require_training_text, retrieval_baseline
from pipeline.evaluation.overhead import fastest_threads
from pipeline.evaluation.prompts import CheckRequest, rule_of
from pipeline.evaluation.speed import (
    ACCELERATED,
    PLAIN,
    Decode,
    Pass,
    baseline,
    baseline_figures,
    by_category,
    check_speed,
    decode_by,
    require_steps,
    take_turns,
    with_new_answers,
)
from pipeline.evaluation.ties import (
    Comparison,
    below_best,
    compare,
    native_logit_change,
    tie_tolerance,
)
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.export.directory import read_heads
from pipeline.export.layout import read_layout
from pipeline.targets.loading import input_device, load_on_gpus
from pipeline.targets.spec import context_length, eos_token_ids, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_WARM_UPS = 2  # prompts


@dataclass(frozen=True)
class Measurement:
    """Answers decoded natively: plainly, with the heads, and by the baselines.

    Attributes:
        passes: The repetitions of decoding by the check's acceptance rule.
        greedy_passes: The repetitions of greedy decoding, baselines included. If the rule is
            greedy, they are `passes`; otherwise there is one repetition.
        failed: For each baseline that failed, by name, the reason.
        change: How far logits change between forward passes over plain decoding's greedy answers.
    """

    request: CheckRequest
    model: PreTrainedModel
    passes: list[Pass]
    greedy_passes: list[Pass]
    failed: dict[str, str]
    change: float

    def comparison(self, method: str) -> Comparison:
        """Compare a method's greedy answers with plain decoding's, in the first repetition."""
        request = self.request
        greedy = self.greedy_passes[0]
        return compare(
            request.prompts,
            token_ids(greedy[PLAIN]),
            token_ids(greedy[method]),
            partial(below_best, self.model),
            tie_tolerance(self.change, request.settings),
        )


def check_native(
    request: CheckRequest, progress: ProgressReporter = SILENT
) -> tuple[CheckResult, AnswerLines]:
    """Check an export natively: decode every prompt plainly, with the tree and by the baselines.

    Returns:
        The native part of a check, and the answers of plain decoding and of the heads.

    Raises:
        ConfigError: Every answer ended with its first token, so there is no step to measure; or a
            baseline reads training text, which the request lacks.
    """
    require_training_text(request.settings, request.trained)
    target = request.target
    settings = request.settings
    prompts = request.prompts
    progress.begin("the target loads", 0)
    model = load_on_gpus(target, request.gpus)
    layout = read_layout(request.export)
    eos = eos_token_ids(target)
    room = context_length(target)
    plain = plain_decoder(model, eos_token_ids=eos, max_length=room)
    heads = read_heads(request.export, model).to(input_device(model))
    accelerated = Decoder(model, heads, request.tree, eos_token_ids=eos, max_length=room)
    baselines: dict[str, Decode] = {}
    for name in settings.baselines:
        if name == RETRIEVAL:
            assert request.trained is not None, "require_training_text"
            baselines[name] = retrieval_baseline(
                request.trained,
                model,
                accelerated.tree.num_nodes,
                num_tokens=settings.max_new_tokens,
                eos_token_ids=eos,
                max_length=room,
            )
        else:
            baselines[name] = baseline(name, model, eos, settings.max_new_tokens, request.assistant)
    endless = plain_decoder(model, eos_token_ids=(), max_length=room)
    with fastest_threads(endless, prompts[0].ids):
        measured = decode_check_prompts(request, plain, accelerated, baselines, progress)
        greedy = token_ids(measured.greedy_passes[0][PLAIN])
        ranks = answer_ranks(model, heads, prompts, greedy, 1)
        chain = cartesian_tree([1] * layout.num_speculative_tokens)
        comparison = measured.comparison(ACCELERATED)
        figures = native_figures(measured, comparison)
    figures = replace(figures, chain_rate=rounded(replay(ranks, chain).acceleration_rate))
    tokenizer = load_tokenizer(target)
    answers = {}
    for side, method in ((PLAIN, PLAIN), (ACCELERATED, layout.shape.kind)):
        written = [one[side] for one in measured.passes]
        answers[method] = answer_lines(f"{request.name}-{method}", tokenizer, prompts, written)
    result = CheckResult(
        native=figures,
        samples=samples(tokenizer, prompts, measured.passes[0][ACCELERATED]),
        differing=comparison.differing,
    )
    return result, answers


def decode_check_prompts(
    request: CheckRequest,
    plain: Decoder,
    accelerated: Decoder,
    baselines: dict[str, Decode],
    progress: ProgressReporter,
) -> Measurement:
    """Decode the check's prompts by every method in turns, after a warm-up.

    They are decoded `check.repeats` times by the check's acceptance rule. If this rule is not
    greedy, they are also decoded greedily once. Baselines decode greedily only. A baseline that
    fails on a prompt is left out from there on; the other methods continue.

    Raises:
        ConfigError: Every answer ended with its first token, so there is no step to measure.
    """

    rule = rule_of(request.settings)
    num_tokens = request.settings.max_new_tokens
    prompts = request.prompts
    greedily = {
        PLAIN: decode_by(plain, greedy_acceptance, num_tokens),
        ACCELERATED: decode_by(accelerated, greedy_acceptance, num_tokens),
        **baselines,
    }
    by_rule = greedily
    if rule is not greedy_acceptance:
        by_rule = {
            PLAIN: decode_by(plain, rule, num_tokens),
            ACCELERATED: decode_by(accelerated, rule, num_tokens),
        }
    failed: dict[str, str] = {}
    warmed = prompts[:NUM_WARM_UPS]
    if plain.captures or accelerated.captures:
        warmed = prompts  # so that the graphs of every length are captured before timing
    progress.begin("native, warm-up", 0, unit="answers")
    take_turns(greedily, warmed, failed, progress)
    if rule is not greedy_acceptance:
        take_turns(by_rule, warmed, failed, progress)
    passes = []
    num_answers = request.settings.repeats * len(prompts) * len(by_rule)
    progress.begin("native", num_answers, unit="answers")
    for _ in range(request.settings.repeats):
        passes.append(take_turns(by_rule, prompts, failed, progress))
    greedy_passes = passes
    if rule is not greedy_acceptance:
        progress.begin("native, greedy", len(prompts) * len(greedily), unit="answers")
        greedy_passes = [take_turns(greedily, prompts, failed, progress)]
    require_steps(answer.accepted for answer in passes[0][ACCELERATED])
    written = token_ids(greedy_passes[0][PLAIN])
    change = native_logit_change(plain.model, prompts, written)
    return Measurement(request, plain.model, passes, greedy_passes, failed, change)


def native_figures(measured: Measurement, comparison: Comparison) -> NativeFigures:
    """Compute the native check's figures (`check.native`), except `chain_rate`."""
    request = measured.request
    passes = measured.passes
    settings = request.settings
    prompts = request.prompts
    decoded = passes[0][ACCELERATED]
    baselines = []
    for name in settings.baselines:
        if name in measured.failed:
            baselines.append(Baseline(name=name, failed=measured.failed[name]))
        else:
            match = measured.comparison(name).match
            figures = baseline_figures(prompts, measured.greedy_passes, name)
            baselines.append(replace(figures, greedy_match=match))
    found = NativeFigures(
        **vars(check_speed(prompts, passes)),
        greedy_match=comparison.match,
        largest_gap=comparison.largest_gap,
        tie_tolerance=tie_tolerance(measured.change, settings),
        logit_change=measured.change,
        prompts=len(prompts),
        target_parameters=measured.model.num_parameters(),
        acceptance=settings.acceptance,
        temperature=None if settings.acceptance == "greedy" else settings.temperature,
        categories=by_category(prompts, passes),
        baselines=baselines,
    )
    accepted = [answer.accepted for answer in decoded]
    return with_new_answers(found, request, token_ids(decoded), accepted)


def token_ids(decoded: Sequence[Decoded]) -> list[list[int]]:
    """Return the token ids of each decoded answer."""
    return [one.token_ids for one in decoded]
