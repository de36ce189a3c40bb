"""Warnings of a report: problems that do not fail the check, and why heads do not pay."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.artifacts.check_result import (
    HEADS,
    EngineFigures,
    Speed,
    VllmFigures,
)
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.artifacts.tree_file import TreeFigures
from pipeline.formatting import count, percent, ratio, times
from pipeline.report.facts import MANY_SEEN, Prediction, rough_note
from pipeline.report.report import Report, TrainFigures
from pipeline.report.speeds import Repeats, is_disturbed, range_cell
from pipeline.report.what_to_serve import at_a_time, load_rows, serving_advice

NOTABLE_GAP = 3  # standard errors between the expected acceleration rate and the measured one
ENOUGH_COVERAGE = 0.9  # share of held-out text in the draft vocabulary
UNSTEADY = 1.5  # plain decoding's fastest repeat over its slowest
FEW_PROMPTS = 300  # with as many, heads begin to help
FEW_STEPS = 100  # of training
SMALL_TARGET = 1e9  # parameters
AGAIN = "Check again on an idle machine (a run: --fresh check)."
MOSTLY_KEPT = 0.6  # share of vLLM's steps that keep the last draft token


def report_warnings(report: Report) -> list[str]:
    """List a report's warnings: problems that do not fail the check."""
    native, vllm, tree = report.native, report.vllm, report.tree
    found = []
    if report.seeds:
        found += report.seeds.warnings or []
    if report.train:
        found += _training_warnings(report.train)
    if report.check and report.check.contaminated_rows:
        found.append(
            f"{count(report.check.contaminated_rows)} training rows hold a question of the check,"
            " so its rates may be too high: with seeds.decontaminate, and this file of questions"
            " from the start, they are left out."
        )
    if native:
        if tree and native.acceptance in (None, "greedy"):  # calibration expects greedy decoding
            found += _rate_gap_warnings("The measured acceleration rate", native, tree)
    if vllm:
        found += _rate_gap_warnings("vLLM's acceleration rate", vllm, vllm)  # the chain's rates
    found += _speed_warnings(report)
    if native and not load_rows(report):  # else what to serve begins with this note
        note = rough_note(native)
        if note:
            found.append(note)
    found += _missing_prompt_warnings(report)
    found += _losses(report)
    return found


def _training_warnings(train: TrainFigures) -> Iterator[str]:
    """Yield warnings of the train stage for the report."""
    yield from train.warnings or []
    if train.best_step == 0:
        yield (
            f"None of {count(train.steps)} steps lowered the held-out loss: the result is the state"
            " that training began with. Lower train.lr, or give more seeds."
        )
    coverage = train.draft_coverage
    if coverage is not None and coverage < ENOUGH_COVERAGE:
        yield (
            f"Only {percent(coverage)} of held-out text is in the draft vocabulary, and any other"
            " token ends what can be accepted: raise train.draft_vocab."
        )


def _speed_warnings(report: Report) -> Iterator[str]:
    """Yield warnings for the report about speeds that other load on the machine has changed."""
    alone: dict[str, Speed] = {}
    plain: dict[str, Speed] = {}  # plain decoding's repeats are the same for all methods of a load
    if report.native:
        alone["natively"] = report.native
        plain["natively"] = report.native
    for row in load_rows(report):
        load = f"in vLLM, {at_a_time(row.requests)}"
        plain[load] = row
        if row.requests == 1:
            alone[f"{row.method} {load}"] = row
    disturbed = []
    for where, found in alone.items():
        if is_disturbed(found):
            disturbed.append(f"{where} {times(found.speedup)}, {ratio(found.acceleration_rate)}")
    if disturbed:
        yield (
            "With one request at a time, these speedups exceed the acceleration rate:"
            f" {'; '.join(disturbed)}. Another process probably slowed plain decoding. {AGAIN}"
        )
    unsteady = []
    for where, found in plain.items():
        if found.baseline_range and found.baseline_range[1] > UNSTEADY * found.baseline_range[0]:
            unsteady.append(f"{where} {range_cell(found.baseline_range)}")
    if unsteady:
        yield (
            f"Plain decoding's repeats differ by more than {UNSTEADY}x in tokens/s:"
            f" {'; '.join(unsteady)}. The machine's speed varied, so these speedups are uncertain."
            f" {AGAIN}"
        )


def _missing_prompt_warnings(report: Report) -> Iterator[str]:
    """Yield a warning for the report if a source has fewer held-out rows than its share."""
    sources = (report.check and report.check.prompt_sources) or []
    num_prompts = sum(source.prompts for source in sources)
    num_conversations = sum(source.conversations for source in sources)
    missing = []
    for source in sources:
        share = num_prompts * source.conversations // num_conversations
        if source.prompts == source.held_out < share:
            name = ", ".join(filter(None, (source.source, source.category)))
            missing.append(f"{name} {source.prompts} of {share}")
    if missing:
        yield (
            "These sources have fewer held-out conversations that leave room for an answer than"
            f" their share of the check's {num_prompts} prompts: {'; '.join(missing)}. Others took"
            " their place, so the rates say less about these sources: raise seeds.holdout."
        )


def _rate_gap_warnings(
    name: str, engine: EngineFigures, prediction: TreeFigures | VllmFigures
) -> Iterator[str]:
    """Yield a warning for the report if measured and expected rates differ notably.

    A difference is notable above `NOTABLE_GAP` standard errors. If both rates on new answers are
    known, these are compared, since the share of seen answers may differ.
    """
    found = _rates_to_compare(engine, prediction)
    if engine.new and prediction.new:
        found = _rates_to_compare(engine.new, prediction.new) or found
    if found is None:
        return
    measured, expected, error = found
    if abs(measured - expected) > NOTABLE_GAP * error:
        yield (
            f"{name} is {ratio(measured)}, and {ratio(expected)} was expected, further apart than"
            f" {NOTABLE_GAP} standard errors: the check's prompts may differ in kind from the text"
            " of calibration, or in the share of answers that are in the training text."
        )


def _rates_to_compare(
    measured: EngineFigures | NewAnswers, expected: Prediction
) -> tuple[float, float, float] | None:
    """Return the measured rate, the expected rate and their joint standard error.

    None if one of them is unknown.
    """
    if measured.acceleration_rate is None or measured.standard_error is None:
        return None
    if expected.expected_acceleration_rate is None or expected.expected_standard_error is None:
        return None
    error = math.hypot(measured.standard_error, expected.expected_standard_error)
    return measured.acceleration_rate, expected.expected_acceleration_rate, error


def _losses(report: Report) -> Iterator[str]:
    """Yield the known reasons that hold, if the heads do not pay in an engine, and what helps."""
    places = []
    native = report.native
    if native and native.speedup is not None and not is_disturbed(native):
        heads, plain = Repeats.of_heads(native), Repeats.of_plain(native)
        if heads.slowest <= plain.fastest:
            places.append("natively")
    for advice in serving_advice(report)[:1]:
        if advice.method and not advice.method.startswith(HEADS):
            places.append(f"in vLLM, {at_a_time(advice.requests)}")
    reasons = list(_reasons(report))
    if places and reasons:
        yield f"Heads do not pay {' and '.join(places)}. Possible reasons: {'; '.join(reasons)}."


def _reasons(report: Report) -> Iterator[str]:
    """Yield the known reasons for heads that do not pay which hold for a report."""
    prompts = report.seeds.train_rows if report.seeds else None
    if prompts is not None and prompts < FEW_PROMPTS:
        yield f"{count(prompts)} training prompts, {FEW_PROMPTS} or more help (seeds.sources)"
    steps = report.train.steps if report.train else None
    if steps is not None and steps < FEW_STEPS:
        yield f"{count(steps)} training steps, {FEW_STEPS} or more help (train.epochs)"
    native, vllm = report.native, report.vllm
    parameters = native.target_parameters if native else None
    if parameters is not None and parameters < SMALL_TARGET:
        yield (
            f"a target of {parameters / 1e6:,.1f}M parameters, whose step is so short that the"
            " heads' own operations weigh as much (a larger target gains more)"
        )
    if report.hardware and not report.hardware.get("gpus"):
        yield "a CPU, on which a step takes longer with every token that it verifies (use a GPU)"
    engine = native or vllm
    if engine and (engine.seen_share or 0) > MANY_SEEN:
        yield (
            f"{percent(engine.seen_share)} of the answers are in the training text (more different"
            " questions help)"
        )
    kept = (vllm and vllm.accepted_per_position) or [0.0]
    if report.tree and len(kept) < len(report.tree.chain) and kept[-1] > MOSTLY_KEPT:
        yield (
            f"a chain of {count(len(kept))} in vLLM, all of it kept in {percent(kept[-1])} of the"
            " steps (raise calibrate.draft_tokens)"
        )
