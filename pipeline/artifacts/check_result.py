"""The result of the check stage: its figures in DONE.json, its verdict, and its answer files.

Field names are the keys of DONE.json and of report.json, which leave out fields that are None.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pipeline.artifacts.json_form import from_json, result
from pipeline.artifacts.seen_answers import NewAnswers
from pipeline.config import Config
from pipeline.storage.atomic import JsonObject
from pipeline.storage.receipts import Summary

PLAIN, HEADS = "plain", "heads"  # methods of decoding in vLLM; others have their own names
LEAST_SHORTFALL = 0.1  # tokens per step
LEAST_LEARNED = 0.1  # share of the labels that guessing by frequency misses


@dataclass(frozen=True)
class Limits:
    """The settings that decide whether a check result passes."""

    min_rate: float
    max_tie_share: float
    max_kl: float

    @classmethod
    def of(cls, config: Config) -> Limits:
        """Return the limits that a configuration states."""
        check, max_kl = config.check, config.train.backbone.max_kl
        return cls(check.min_acceleration_rate, check.max_tie_share, max_kl)


@dataclass(frozen=True)
class GreedyMatch:
    """Counts of greedy answers: all, equal to plain decoding's, and first differing at a tie.

    `tokens` counts the tokens compared: each answer's, up to its first difference.
    """

    sequences: int
    identical: int
    ties: int  # whose first difference is a tie
    tokens: int

    @property
    def differing(self) -> int:
        """The number of greedy answers whose first difference is not a tie."""
        return self.sequences - self.identical - self.ties


@dataclass(frozen=True)
class Difference:
    """The first difference of a greedy answer from plain decoding, which is not a tie."""

    id: str  # of the prompt
    at: int  # index of the first differing token
    plain: list[int]  # the token and a few after it, of each side
    other: list[int]
    plain_below: float | None  # the token's logit below the target's best; None after an end
    other_below: float | None
    model: str | None = None  # the served copy, if that was decoded


@result
class Speed:
    """Decoding speed with heads and of plain decoding (`baseline_…`).

    A figure that was not measured is None. A range is tokens per second over the repeats, slowest
    first; with one repeat it is None.
    """

    acceleration_rate: float | None = None
    standard_error: float | None = None
    overhead: float | None = None
    speedup: float | None = None
    tokens_per_second: float | None = None
    baseline_tokens_per_second: float | None = None
    range: list[float] | None = None
    baseline_range: list[float] | None = None


@result
class Category(Speed):
    """Decoding speed on the prompts of one category."""

    category: str
    prompts: int


@result
class Baseline(Speed):
    """The speed of a decoding method without heads, or the reason why it `failed`."""

    name: str
    failed: str | None = None
    greedy_match: GreedyMatch | None = None
    categories: list[Category] | None = None


@result
class Percentiles:
    """Percentiles of a time under load, in milliseconds."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


@result
class ServedMethod(Baseline):
    """A method of drafting in vLLM, by its `speculative_config`."""

    speculative_config: JsonObject | None = None


@result
class LoadRow(Speed):
    """Speed and latencies of a method in vLLM with `requests` concurrent requests."""

    method: str = HEADS
    requests: int
    ttft_ms: Percentiles | None = None  # to the first token
    tpot_ms: Percentiles | None = None  # per further token
    baseline_ttft_ms: Percentiles | None = None
    baseline_tpot_ms: Percentiles | None = None


@result
class Studies:
    """The rows of each study; None if it was not run."""

    load: list[LoadRow] | None = None


@result
class EngineFigures(Speed):
    """The check's figures that native decoding and vLLM have in common."""

    acceleration_rate: float
    greedy_match: GreedyMatch
    tie_tolerance: float | None = None
    logit_change: float | None = None  # from which the tolerance follows, unless it is set
    largest_gap: float | None = None  # of a token to the best logit, in differences that are no tie
    seen_share: float | None = None  # share of answers that are also in training rows
    new: NewAnswers | None = None


@result
class NativeFigures(EngineFigures):
    """The check's figures of native decoding with the tree."""

    prompts: int | None = None
    skipped_prompts: int | None = None
    target_parameters: int | None = None
    acceptance: str | None = None
    temperature: float | None = None
    categories: list[Category] | None = None
    baselines: list[Baseline] | None = None
    chain_rate: float | None = None  # of vLLM's chain, replayed on plain answers


@result
class VllmFigures(EngineFigures):
    """The check's figures of vLLM with the heads' top-1 chain."""

    num_speculative_tokens: int | None = None
    methods: list[ServedMethod] | None = None  # the heads first
    loads: list[LoadRow] | None = None  # of all methods, with one prompt and all prompts at once
    studies: Studies | None = None
    failed_loads: dict[str, str] | None = None  # why a method has no rows in the study `load`
    accepted_per_position: list[float] | None = None
    same_text_acceleration_rate: float | None = None  # replayed on native answers
    expected_acceleration_rate: float | None = None
    expected_standard_error: float | None = None


@result
class Engines:
    """The check's figures by decoding engine; None for an engine that was not run."""

    native: NativeFigures | None = None
    vllm: VllmFigures | None = None

    def engine_failures(self, limits: Limits) -> list[str]:
        """Return the reasons why the engines' figures fail the check; empty if they pass."""
        found, vllm = [], self.vllm
        if self.native is not None:
            found += _failures_of_engine("native", self.native, limits)
        if vllm is not None:
            found += _failures_of_engine("vllm", vllm, limits)
            if vllm.accepted_per_position is not None and not any(vllm.accepted_per_position):
                found.append("vllm: no draft token was accepted")
            expected = _missed_rate(vllm)
            if expected is not None:
                found.append(
                    f"vllm: acceleration rate {vllm.acceleration_rate:.2f} is far below the"
                    f" {expected:.2f} to expect of this chain: vLLM does not draft what was trained"
                )
        return found


@result
class ServedModel(Engines):
    """The check's figures on the copy of the target that will be served."""

    model: str
    format: str


@dataclass(frozen=True)
class SampleToken:
    """One decoded token and the decoding step that yielded it."""

    text: str
    step: int  # 0 is the prefill


@dataclass(frozen=True)
class Sample:
    """A prompt and its decoded answer, for the report."""

    prompt: str
    tokens: list[SampleToken]


@result
class TunedDrift:
    """Distance of a tuned backbone's predictions from the original's.

    All figures are None if no position was compared.
    """

    kl: float | None = None  # nats per position
    perplexity: dict[str, float] | None = None
    perplexity_change: float | None = None
    greedy_agreement: float | None = None
    positions: int | None = None


@result
class PromptSource:
    """The conversations of a source, or of a category in it, and the check's prompts from them.

    Attributes:
        conversations: The conversations of all splits.
        held_out: The held-out conversations with a prompt that leaves room for an answer.
        prompts: Those that the check decodes.
    """

    source: str
    category: str | None = None
    conversations: int
    held_out: int
    prompts: int


@result
class CheckFigures(Engines):
    """The section `check` of report.json."""

    prompt_sources: list[PromptSource] | None = None  # None for a file of questions
    contaminated_rows: int | None = None
    passed: bool
    failures: list[str]


@result
class CheckResult(Engines):
    """The summary of the check stage, or the part of it that one decoding engine measured."""

    served_model: ServedModel | None = None
    differing: list[Difference] = field(default_factory=list)
    head_0: dict[str, float] | None = None  # its top1 to top5 on held-out text
    frequency: dict[str, float] | None = None  # accuracy of guessing the most frequent tokens
    drift: TunedDrift | None = None  # of the published weights; None if no backbone was tuned
    samples: list[Sample] = field(default_factory=list)
    prompt_sources: list[PromptSource] | None = None  # None for a file of questions
    contaminated_rows: int | None = None  # training rows that hold a question of the check's file
    hardware: JsonObject | None = None  # of the machine that decoded
    versions: dict[str, str] | None = None
    configuration: JsonObject | None = None
    target_revision: str | None = None  # the commit of a target from the Hub
    passed: bool | None = None

    def failures(self, limits: Limits) -> list[str]:
        """Return the reasons why the heads must not be published; empty if the check passed."""
        found = self.engine_failures(limits)
        copy = self.served_model
        if copy is not None:
            for reason in copy.engine_failures(limits):
                found.append(f"on {copy.model}: {reason}")
        if limits.min_rate > 0:
            found += self._learning_failures()
        if self.drift is not None:
            kl = math.nan if self.drift.kl is None else self.drift.kl
            if not kl <= limits.max_kl:
                found.append(
                    f"the tuned backbone is {kl:.4f} nats from the target, above"
                    f" train.backbone.max_kl = {limits.max_kl:g}"
                )
        return found

    def figures(self, limits: Limits) -> CheckFigures:
        """Apply the limits, and return the figures for report.json."""
        failures = self.failures(limits)
        return CheckFigures(
            native=self.native,
            vllm=self.vllm,
            prompt_sources=self.prompt_sources,
            contaminated_rows=self.contaminated_rows,
            passed=not failures,
            failures=failures,
        )

    def _learning_failures(self) -> list[str]:
        """Return a failure if head 0 is hardly better than guessing the most frequent tokens.

        If always guessing them is right for a share g < 1 of the labels, head 0's accuracy must be
        at least g + `LEAST_LEARNED`·(1-g), at top-1 and at top-5. The gain (accuracy-g)/(1-g) is
        about 0 for untrained heads, 5 % for heads trained for a few steps, and 33 % or more for
        useful heads, independent of target and vocabulary. The list has at most one failure, and
        none if nothing was measured.
        """
        if not self.head_0 or not self.frequency:
            return []
        for rank in ("top1", "top5"):
            accuracy, guessed = self.head_0[rank], self.frequency[rank]
            if guessed < 1 and accuracy - guessed < LEAST_LEARNED * (1 - guessed):
                return [
                    "the heads have learned hardly anything: on held-out text head 0's"
                    f" {rank.replace('top', 'top-')} accuracy is {accuracy:.1%}, and always"
                    f" guessing the most frequent tokens would reach {guessed:.1%}: heads have to"
                    f" get {LEAST_LEARNED:.0%} of what that misses"
                ]
        return []


def check_failures(summary: Summary, config: Config) -> list[str]:
    """List the reasons why a finished check stage's result breaks the limits of `config`."""
    return from_json(CheckResult, summary).failures(Limits.of(config))


def _failures_of_engine(name: str, engine: EngineFigures, limits: Limits) -> list[str]:
    """Return the reasons why one engine's figures fail: differing answers, ties, low rate."""
    found, match = [], engine.greedy_match
    if match.differing:
        found.append(
            f"{name}: {match.differing} of {match.sequences} greedy sequences differ from plain"
            f" decoding: a token is {engine.largest_gap} below the target's best logit, and a tie"
            f" is within {engine.tie_tolerance or 0:.2g} (check.tie_tolerance)"
        )
    if match.ties > max(1, limits.max_tie_share * match.tokens):
        found.append(
            f"{name}: {match.ties} ties in {match.tokens:,} greedy tokens, more than"
            f" check.max_tie_share = {limits.max_tie_share:g} of them"
        )
    if not engine.acceleration_rate >= limits.min_rate:
        found.append(
            f"{name}: acceleration rate {engine.acceleration_rate:.2f} is below"
            f" check.min_acceleration_rate = {limits.min_rate:.2f}"
        )
    return found


def _missed_rate(vllm: VllmFigures) -> float | None:
    """Return the rate expected of vLLM's chain if the measured rate is far below it, else None.

    The expected rate is the chain's rate on the same text or, if unknown, the rate that calibration
    expects. The measured rate is far below it if it misses more than half of the expected gain over
    plain decoding, more than 3 standard errors, and more than `LEAST_SHORTFALL`. The rate on the
    same text has no sampling error. Calibration's rate is used only if the standard errors of both
    rates are known.

    Heads that vLLM reads wrongly gain next to nothing; other prompts or engines change the gain by
    less than half.
    """
    expected, error = vllm.same_text_acceleration_rate, 0.0
    if expected is None:
        expected = vllm.expected_acceleration_rate
        if vllm.standard_error is None or vllm.expected_standard_error is None:
            return None
        error = math.hypot(vllm.standard_error, vllm.expected_standard_error)
    if expected is None:
        return None
    shortfall = expected - vllm.acceleration_rate
    if shortfall > max((expected - 1) / 2, 3 * error, LEAST_SHORTFALL):
        return expected
    return None
