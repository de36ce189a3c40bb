"""Title, outcome, headline figures and warnings of a report, shared by all its formats."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.artifacts.check_result import (
    HEADS,
    EngineFigures,
    GreedyMatch,
    NativeFigures,
    VllmFigures,
)
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.artifacts.tree_file import Expected, TreeFigures
from pipeline.formatting import (
    UNKNOWN,
    count,
    percent,
    rate,
    ratio,
    signed_percent,
    times,
    with_error,
)
from pipeline.report.report import SEARCHED_TREE, STOCK_TREE, Report, TrainFigures
from pipeline.report.text_table import NOT_RUN, Table

SAME_TEXT_GAP = 0.1  # as a share of the gain over plain decoding
DISTURBED = 1.1  # a speedup over this many acceleration rates is due to other load
NOTABLE_GAP = 3  # standard errors between the expected acceleration rate and the measured one
ENOUGH_PROMPTS = 16  # decoded by the check
MANY_SEEN = 0.25  # share of the check's answers that are in the training text as well
ROUGH = 0.2  # standard error of an expected rate, as a share of the rate
ENOUGH_COVERAGE = 0.9  # share of held-out text in the draft vocabulary
NATIVE_FIGURES = (
    "Acceleration rate",
    "Overhead",
    "Speedup",
    "Greedy identical",
    "Tokens/s, plain",
    "Tokens/s, with heads",
)

Prediction = Expected | TreeFigures | VllmFigures | NewAnswers


@dataclass(frozen=True)
class Outcome:
    """A verdict in a report, good or bad; None is a warning, or that nothing was checked."""

    is_good: bool | None
    text: str
    failures: tuple[str, ...] = ()


def report_title(report: Report) -> str:
    """Return the title of a report: the run's name."""
    return report.run.name if report.run else "Unnamed run"


def report_subtitle(report: Report) -> str:
    """Return the subtitle of a report: heads, recipe, target and date, as far as known.

    A target in a local directory is called by the directory's name.
    """
    parts = [report.drafter]
    if report.train and report.train.recipe:
        parts.append(f"{report.train.recipe} recipe")
    if report.target:
        target = Path(report.target)
        parts.append(f"target {target.name if target.is_absolute() else target}")
    if report.run:
        parts.append(report.run.date)
    return ", ".join(part for part in parts if part)


def check_outcome(report: Report) -> Outcome:
    """Return the outcome of a report's check: passed, failed with its failures, or not run.

    A passed check states how many greedy sequences of all engines differ at a tie, if any does.
    """
    if not report.check:
        return Outcome(None, "Check not run")
    if not report.check.passed:
        return Outcome(False, "Check failed", tuple(report.check.failures))
    text = "Check passed: greedy text as without heads"
    ties = sequences = 0
    for engine in (report.native, report.vllm):
        if engine:
            ties += engine.greedy_match.ties
            sequences += engine.greedy_match.sequences
    if ties:
        text += f", except {ties} of {sequences} sequences at ties"
    return Outcome(True, text)


def speed_outcomes(report: Report) -> list[Outcome]:
    """Return what the heads gain in each engine whose speedup is known and not disturbed.

    That in vLLM is left out if the study `load` measured its server.
    """
    outcomes = []
    engines: dict[str, EngineFigures | None] = {"natively": report.native}
    if report.vllm and not report.studies.load:  # whose list of what to serve says more
        number = count(report.vllm.greedy_match.sequences)
        engines[f"in vLLM, {number} prompts at once"] = report.vllm
    for name, engine in engines.items():
        if not engine or engine.speedup is None or is_disturbed(engine):
            continue
        speedup = f"{times(engine.speedup)} {name}"
        if engine is report.vllm and _is_within_scatter(report.vllm):
            outcomes.append(Outcome(None, f"{speedup}: within the scatter of its repeats"))
        elif round(engine.speedup, 2) == 1:
            outcomes.append(Outcome(None, f"{speedup}: as fast with heads"))
        elif engine.speedup > 1:
            outcomes.append(Outcome(True, f"{speedup}: faster with heads"))
        else:
            outcomes.append(Outcome(None, f"{speedup}: slower with heads"))
    return outcomes


def _is_within_scatter(vllm: VllmFigures) -> bool:
    """Return whether the repeats with heads overlap those of plain vLLM, all prompts at once.

    The result is False if either has one repeat.
    """
    for row in vllm.loads or []:
        is_of_all = row.method == HEADS and row.requests == vllm.greedy_match.sequences
        if is_of_all and row.range and row.baseline_range:
            slowest, fastest = row.range
            return slowest <= row.baseline_range[1] and row.baseline_range[0] <= fastest
    return False


def expected_rate(prediction: Prediction | None) -> str:
    """Format an expected acceleration rate with its standard error: `4.03 ± 0.32`, or `-`."""
    if not prediction:
        return UNKNOWN
    error = prediction.expected_standard_error
    return with_error(prediction.expected_acceleration_rate, error)


def measured_rate(engine: EngineFigures | NewAnswers | None) -> str:
    """Format a measured acceleration rate with its standard error: `4.03 ± 0.32`, or `-`."""
    if not engine:
        return UNKNOWN
    return with_error(engine.acceleration_rate, engine.standard_error)


def on_new_answers(engine: EngineFigures | None) -> str:
    """Format an engine's acceleration rate on the answers that are not in the training text.

    It is `-` if all answers are new or this is unknown, and states the number of new answers if
    they are too few for a rate.
    """
    if not engine or not engine.seen_share or not engine.new:
        return UNKNOWN
    if engine.new.acceleration_rate is None:
        return f"only {count(engine.new.answers)} new answers"
    return measured_rate(engine.new)


def is_disturbed(engine: EngineFigures) -> bool:
    """Return whether other load disturbed the speed measurement of a reported engine.

    A step with heads does more work than a plain step. If it is measured as clearly faster, other
    load has slowed the plain steps, and the measured speedup means nothing.
    """
    limit = DISTURBED * engine.acceleration_rate
    return engine.speedup is not None and engine.speedup > limit


def speedup_of(engine: EngineFigures | None) -> str:
    """Format a report's measured speedup; `-` if unknown or disturbed by other load."""
    if not engine or is_disturbed(engine):
        return UNKNOWN
    return times(engine.speedup)


def overhead_of(native: NativeFigures | None) -> str:
    """Format a report's measured overhead; `-` if unknown or disturbed by other load."""
    if not native or is_disturbed(native):
        return UNKNOWN
    return times(native.overhead)


def greedy_matches(match: GreedyMatch | None) -> str:
    """Format how many greedy sequences equal plain decoding: `31/32`, or `-` if unknown."""
    if not match:
        return UNKNOWN
    return f"{count(match.identical)}/{count(match.sequences)}"


def headline_table(report: Report) -> Table:
    """Build the report's table of headline figures, in the paper's terms (3 and appendix B)."""
    table = Table("Headline", ["figure", "value", "meaning"], words=(0, 2))
    vllm = report.vllm
    if report.native:
        _add_native_figures(table, report.native, report)
    else:
        for label in NATIVE_FIGURES:
            table.add(label, NOT_RUN, "")
    if vllm:
        note = "top-1 chain, no tree"
        if vllm.expected_acceleration_rate is not None:
            note += f"; {expected_rate(vllm)} expected"
        note += f"; greedy identical {greedy_matches(vllm.greedy_match)}"
        table.add("vLLM acceleration rate", measured_rate(vllm), note)
        _add_new_answers(table, "On new answers, vLLM", vllm, vllm)
    else:
        table.add("vLLM acceleration rate", NOT_RUN, "")
    return table


def _add_native_figures(table: Table, native: NativeFigures, report: Report) -> None:
    """Add native decoding's rates, speeds and greedy matches to the headline table."""
    tree, match = report.tree, native.greedy_match
    note = f"tokens per target forward, with the tree; {expected_rate(tree)} expected"
    table.add("Acceleration rate", measured_rate(native), note)
    _add_new_answers(table, "On new answers", native, tree)
    rates = {row.tree: row.acceleration_rate for row in report.studies.trees or []}
    stock, searched = rates.get(STOCK_TREE), rates.get(SEARCHED_TREE)
    if stock and searched:
        note = f"acceleration rate: {ratio(searched)} over {ratio(stock)}, trees of the same size"
        table.add("Search over stock tree", signed_percent(searched / stock - 1), note)
    table.add("Overhead", overhead_of(native), "seconds of a step with heads over a plain one")
    table.add("Speedup", speedup_of(native), "acceleration rate over overhead")
    note = f"sequences equal to plain decoding; {match.ties} equal up to a tie"
    table.add("Greedy identical", greedy_matches(match), f"{note}, {match.differing} not equal")
    plain, with_heads = native.baseline_tokens_per_second, native.tokens_per_second
    table.add("Tokens/s, plain", rate(plain), "the target alone: all answers, over their time")
    table.add("Tokens/s, with heads", rate(with_heads), "the same with its heads")


def _add_new_answers(
    table: Table, label: str, engine: EngineFigures, prediction: TreeFigures | VllmFigures | None
) -> None:
    """Add the rate on new answers to the headline table, unless all answers are new."""
    if not engine.seen_share:
        return
    note = f"{percent(engine.seen_share)} of the answers are in the training text as well"
    if prediction and prediction.new and prediction.new.expected_acceleration_rate is not None:
        note += f"; {expected_rate(prediction.new)} expected"
    table.add(label, on_new_answers(engine), note)


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
        found += _load_warnings("Native decoding", native)
        if tree and native.acceptance in (None, "greedy"):  # calibration expects greedy decoding
            found += _rate_gap_warnings("The measured acceleration rate", native, tree)
    if vllm:
        found += _load_warnings("vLLM", vllm)
        found += _rate_gap_warnings("vLLM's acceleration rate", vllm, vllm)  # the chain's rates
        found += _same_text_warnings(vllm)
    return [*found, *_little_text_warnings(report), *_missing_prompt_warnings(report)]


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


def _load_warnings(name: str, engine: EngineFigures) -> Iterator[str]:
    """Yield a warning for the report if other load disturbed an engine's check."""
    if is_disturbed(engine):
        yield (
            f"{name}: a step with heads was measured as faster than a plain one, although it does"
            " more. Other load probably slowed the plain steps, and the speedup of"
            f" {times(engine.speedup)} at an acceleration rate of {ratio(engine.acceleration_rate)}"
            " is too high; `--fresh check` measures again."
        )


def _same_text_warnings(vllm: VllmFigures) -> Iterator[str]:
    """Yield a warning for the report if vLLM's rate is well below native's on the same text."""
    same_text, reached = vllm.same_text_acceleration_rate, vllm.acceleration_rate
    if same_text is not None and same_text - reached > SAME_TEXT_GAP * (same_text - 1):
        yield (
            f"vLLM's acceleration rate is {ratio(reached)}, and the same chain reaches"
            f" {ratio(same_text)} natively on the same text: vLLM may compute the heads in another"
            " precision or not as they were trained, or draft nothing near the end of the context."
        )


def _little_text_warnings(report: Report) -> Iterator[str]:
    """Yield warnings for the report if its rates rest on too little held-out or new text."""
    engine, tree = report.native or report.vllm, report.tree
    if engine and (engine.seen_share or 0) > MANY_SEEN:
        yield (
            f"{percent(engine.seen_share)} of the check's answers are in the training text as well."
            " On new text the heads may accept less."
        )
    if engine and engine.greedy_match.sequences < ENOUGH_PROMPTS:
        yield (
            f"The check decoded {count(engine.greedy_match.sequences)} prompts, too few for more"
            " than rough rates and speeds: raise check.prompts, and seeds.holdout if there are no"
            " more held-out rows, or name a file of more questions."
        )
    if not tree or tree.expected_standard_error is None or not tree.expected_acceleration_rate:
        return
    if tree.expected_standard_error > ROUGH * tree.expected_acceleration_rate:
        yield (
            f"The expected acceleration rate is {expected_rate(tree)}: calibration had too little"
            " text, so its tree and chain may not be the best. Raise seeds.holdout, or give it more"
            " questions (calibrate.data)."
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


def pairs(value: Any) -> str:
    """Format a value for one cell of a report's table.

    A dictionary becomes `name value, name value` without values that are None, a list is joined by
    commas, and None becomes an empty text.
    """
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
