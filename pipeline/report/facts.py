"""Title, outcome, headline figures and warnings of a report, the same in every form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeline.artifacts.check_result import (
    EngineFigures,
    GreedyMatch,
    NativeFigures,
    TreeRow,
    VllmFigures,
)
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.artifacts.tree_file import Expected, TreeFigures
from pipeline.formatting import (
    NOT_RUN,
    UNKNOWN,
    count,
    percent,
    rate,
    ratio,
    signed_percent,
    times,
    with_error,
)
from pipeline.report.report import (
    SEARCHED_TREE,
    STOCK_TREE,
    USED_DYNAMIC_TREE,
    USED_TREE,
    Report,
    TrainFigures,
)

SAME_TEXT_GAP = 0.1  # of the gain over plain decoding
NOTABLE_GAP = 3  # standard errors between the expected acceleration rate and the measured one
ENOUGH_COVERAGE = 0.9  # of held-out text by the draft vocabulary
EQUAL = "sequences equal to plain decoding"

Prediction = Expected | TreeFigures | VllmFigures | NewAnswers


@dataclass(frozen=True)
class Figure:
    """A headline figure: its name, its value as text, and its meaning in a few words."""

    label: str
    value: str
    note: str


@dataclass(frozen=True)
class CheckOutcome:
    """Whether the check passed; None where it was not run."""

    passed: bool | None
    text: str
    failures: tuple[str, ...] = ()


def title(report: Report) -> str:
    return f"Heads for {report.target or 'an unnamed target'}"


def subtitle(report: Report) -> str:
    """Method, heads, run and date, as far as known."""
    parts = [report.method]
    if report.train:
        parts.append(report.train.recipe)
    parts.append(report.drafter)
    if report.run:
        parts += [f"run {report.run.name}", report.run.date]
    return ", ".join(part for part in parts if part)


def check_outcome(report: Report) -> CheckOutcome:
    """Whether the check passed, and its failures as sentences."""
    if not report.check:
        return CheckOutcome(None, "check not run")
    if not report.check.passed:
        return CheckOutcome(False, "check failed", tuple(report.check.failures))
    return CheckOutcome(True, "check passed")


def expected_rate(prediction: Prediction | None) -> str:
    """The expected acceleration rate with its standard error: `4.03 ± 0.32`."""
    if not prediction:
        return UNKNOWN
    error = prediction.expected_standard_error
    return with_error(prediction.expected_acceleration_rate, error)


def measured_rate(engine: EngineFigures | NewAnswers | None) -> str:
    """The measured acceleration rate with its standard error."""
    if not engine:
        return UNKNOWN
    return with_error(engine.acceleration_rate, engine.standard_error)


def on_new_answers(engine: EngineFigures) -> str:
    """The rate on answers that the target has not written in training rows."""
    if not engine.new:
        return UNKNOWN
    if engine.new.acceleration_rate is None:
        return f"only {count(engine.new.answers)} new answers"
    return measured_rate(engine.new)


def has_seen_answers(report: Report) -> bool:
    """Whether the target has written any held-out answer in a training row too."""
    parts = (report.tree, report.native, report.vllm)
    return any(part and part.seen_share for part in parts)


def disturbed(engine: EngineFigures) -> bool:
    """Whether a step with heads was measured as faster than a plain one, which does less.

    Other load has then slowed the plain steps, and no speedup follows.
    """
    if isinstance(engine, NativeFigures) and engine.overhead is not None:
        return engine.overhead < 1
    return engine.speedup is not None and engine.speedup > engine.acceleration_rate


def identical(match: GreedyMatch | None) -> str:
    """The number of greedy sequences that equal plain decoding, as `31/32`."""
    if not match:
        return UNKNOWN
    return f"{count(match.identical)}/{count(match.sequences)}"


def headline(report: Report) -> list[Figure]:
    """The headline figures, in the paper's terms (section 3 and appendix B)."""
    native, vllm = report.native, report.vllm
    note = "tokens per target forward, with the tree"
    if report.tree:
        note += f"; {expected_rate(report.tree)} expected"
    rate_reached = NOT_RUN if not native else measured_rate(native)
    figures = [Figure("Acceleration rate", rate_reached, note)]
    if native and native.seen_share:
        figures.append(_on_new_answers("On new answers", native, report.tree))
    if vllm and vllm.seen_share:
        figures.append(_on_new_answers("On new answers, vLLM", vllm, vllm))
    figures += _search_over_stock(report.studies.trees or [])
    figures += _costs(native)
    figures.append(_in_vllm(vllm))
    plain = with_heads = NOT_RUN
    if native:
        plain = rate(native.baseline_tokens_per_second)
        with_heads = rate(native.tokens_per_second)
    figures.append(Figure("Tokens/s, plain", plain, "the target alone, same prompts"))
    figures.append(Figure("Tokens/s, with heads", with_heads, "the target with its heads"))
    return figures


def _costs(native: NativeFigures | None) -> list[Figure]:
    """Overhead, speedup, and the greedy sequences that are equal."""
    overhead = speedup = matched = NOT_RUN
    match_note, doubt = EQUAL, ""
    if native:
        overhead = times(native.overhead)
        speedup = times(native.speedup)
        if disturbed(native):
            overhead = speedup = UNKNOWN
            doubt = "; measured beside other load, see the warning"
        match = native.greedy_match
        matched = identical(match)
        notes = []
        if match.ties:
            notes.append(f"{match.ties} more equal up to a tie")
        if match.differing:
            notes.append(f"{match.differing} not equal")
        match_note = ", ".join(notes) or EQUAL
    return [
        Figure("Overhead", overhead, f"seconds of a step with heads over a plain one{doubt}"),
        Figure("Speedup", speedup, f"acceleration rate over overhead{doubt}"),
        Figure("Greedy identical", matched, match_note),
    ]


def _in_vllm(vllm: VllmFigures | None) -> Figure:
    label = "vLLM acceleration rate"
    if not vllm:
        return Figure(label, NOT_RUN, "top-1 chain, no tree")
    length = f" of {vllm.num_speculative_tokens}" if vllm.num_speculative_tokens else ""
    note = f"top-1 chain{length}, no tree"
    if vllm.expected_acceleration_rate is not None:
        note += f"; {expected_rate(vllm)} expected"
    note += f"; greedy identical {identical(vllm.greedy_match)}"
    return Figure(label, measured_rate(vllm), note)


def _on_new_answers(
    label: str, engine: EngineFigures, prediction: TreeFigures | VllmFigures | None
) -> Figure:
    note = f"{percent(engine.seen_share)} of the answers are in the training text as well"
    if prediction and prediction.new:
        if prediction.new.expected_acceleration_rate is not None:
            note += f"; {expected_rate(prediction.new)} expected"
    return Figure(label, on_new_answers(engine), note)


def _search_over_stock(rows: list[TreeRow]) -> list[Figure]:
    """The gain of the searched tree over the authors' tree; empty where both were not measured."""
    rates = {row.tree: row.acceleration_rate for row in rows}
    stock, searched = rates.get(STOCK_TREE), rates.get(SEARCHED_TREE)
    used = rates.get(USED_TREE, rates.get(USED_DYNAMIC_TREE))
    if not stock or not searched:
        return []
    note = (
        f"acceleration rate: stock tree {ratio(stock)}, searched tree of the same size"
        f" {ratio(searched)}, used tree {ratio(used)}"
    )
    return [Figure("Search over stock tree", signed_percent(searched / stock - 1), note)]


def warnings(report: Report) -> list[str]:
    """Problems that do not fail the check."""
    native, vllm = report.native, report.vllm
    found: list[str] = []
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
    if native and disturbed(native):
        found.append(_other_load(native))
    if vllm and disturbed(vllm):
        found.append(f"vLLM: {_other_load(vllm)}")
    if report.train:
        found += _coverage_warnings(report.train)
    found += _speedup_warnings(report.tree, native)
    if native and report.tree:
        if native.acceptance in (None, "greedy"):  # calibration expects greedy decoding
            found += _gap("The measured acceleration rate", native, report.tree)
    if vllm:
        found += _gap("vLLM's acceleration rate", vllm, vllm)  # it has its own expected rate
        found += _same_text_warnings(vllm)
    return found


def _same_text_warnings(vllm: VllmFigures) -> list[str]:
    same_text, reached = vllm.same_text_acceleration_rate, vllm.acceleration_rate
    if same_text is None or same_text - reached <= SAME_TEXT_GAP * (same_text - 1):
        return []
    return [
        f"vLLM's acceleration rate is {ratio(reached)}, and the same chain reaches"
        f" {ratio(same_text)} natively on the same text: vLLM may compute the heads in another"
        " precision or not as they were trained, or draft nothing near the end of the context."
    ]


def _training_warnings(train: TrainFigures) -> list[str]:
    found = list(train.warnings or [])
    if train.best_step == 0:
        found.append(
            f"None of {count(train.steps)} steps lowered the held-out loss: the result is the state"
            " that training began with, of a second stage the first one's heads and the target as"
            " it was. Lower train.lr, or give more seeds."
        )
    return found


def _coverage_warnings(train: TrainFigures) -> list[str]:
    if train.draft_coverage is None or train.draft_coverage >= ENOUGH_COVERAGE:
        return []
    return [
        f"Only {percent(train.draft_coverage)} of held-out text is in the draft vocabulary, and any"
        " other token ends what can be accepted: raise train.draft_vocab."
    ]


def _other_load(engine: EngineFigures) -> str:
    return (
        "A step with heads was measured as faster than a plain one, although it does more: other"
        f" load probably slowed the plain steps, and the speedup of {times(engine.speedup)} at an"
        f" acceleration rate of {ratio(engine.acceleration_rate)} is too high; `--fresh check`"
        " measures again."
    )


def _speedup_warnings(tree: TreeFigures | None, native: NativeFigures | None) -> list[str]:
    """Whether the heads pay off on this device, as expected and as measured."""
    expected = []
    for size in (tree.sizes if tree else None) or []:
        if size.expected_speedup is not None:
            expected.append(size.expected_speedup)
    speedup = native.speedup if native else None
    best = max(expected, default=None)
    is_slower = speedup is not None and speedup < 1
    if best is None or best >= 1:
        if not is_slower:
            return []
        return [
            "Decoding is slower with the heads than without them: the measured speedup is"
            f" {times(speedup)}."
        ]
    if speedup is None or is_slower:
        return [
            "The tree does not pay off on this device: no expected speedup is above 1, the best"
            f" {times(best)}."
        ]
    return [
        f"Calibration expected no speedup above 1, the best {times(best)}, and the check measured"
        f" {times(speedup)}: other load probably disturbed one of them, and the tree's size may be"
        " wrong; `--fresh calibrate` measures again."
    ]


def _gap(name: str, engine: EngineFigures, prediction: TreeFigures | VllmFigures) -> list[str]:
    """A warning of a rate beyond `NOTABLE_GAP` standard errors of measured and expected together.

    Rates on new answers are compared where both are known: the share of seen answers may differ.
    """
    found = _both_rates(engine, prediction)
    if engine.new and prediction.new:
        found = _both_rates(engine.new, prediction.new) or found
    if found is None:
        return []
    measured, expected, error = found
    if abs(measured - expected) <= NOTABLE_GAP * error:
        return []
    side = "above" if measured > expected else "below"
    errors = f", {abs(measured - expected) / error:.1f} standard errors" if error else ""
    return [
        f"{name} is {abs(measured / expected - 1):.0%} {side} the expected one{errors}: the check's"
        " prompts may differ in kind from the text that it was expected of."
    ]


def _both_rates(
    measured: EngineFigures | NewAnswers, expected: Prediction
) -> tuple[float, float, float] | None:
    """The measured rate, the expected rate, and their joint standard error; None if unknown."""
    if measured.acceleration_rate is None or measured.standard_error is None:
        return None
    if expected.expected_acceleration_rate is None or expected.expected_standard_error is None:
        return None
    error = math.hypot(measured.standard_error, expected.expected_standard_error)
    return measured.acceleration_rate, expected.expected_acceleration_rate, error
