"""check: the export decoded, natively with the tree and in vLLM as it will be served, against the
target alone.

The check fails (exit 1, and push refuses) when a greedy sequence differs other than at a tie, when
vLLM accepts nothing or much less than its chain should, below `check.min_acceleration_rate`, beyond
`train.backbone.max_kl`, or where the heads guess no better than frequency would. A changed limit is
applied to the stored result without decoding again. Each engine runs in a process of its own and
decodes the same prompts; one engine's result is kept when another fails. Native answers are left in
`answers/plain.jsonl` and, with the heads, `answers/KIND.jsonl`, in Spec-Bench's schema. Those to a
file of questions are in `model_answer/MODEL.jsonl` too, as FastChat's judge reads them, and the
original's own beside a tuned backbone's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeline.artifacts.check_result import (
    CheckResult,
    EngineFigures,
    Limits,
    TunedDrift,
    read_answers,
)
from pipeline.artifacts.generated_rows import num_contaminated
from pipeline.artifacts.json_form import from_json, to_json
from pipeline.config import Config
from pipeline.config.load import validate
from pipeline.conversations.duplicates import CheckQuestions
from pipeline.conversations.sources import read_questions
from pipeline.evaluation.references import exact_match, read_references
from pipeline.execution.progress import ProgressReporter
from pipeline.formatting import with_error
from pipeline.run.check_engines import (
    check_request,
    drift_of_published,
    engine_part,
    forget_parts,
    on_served_model,
    with_vllm,
)
from pipeline.run.checks import check_files
from pipeline.run.context import Context, Stage
from pipeline.storage.receipts import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.files import is_local
from pipeline.targets.spec import weight_files
from pipeline.training.methods import method_of

NAME = "check"
VERSION = 20
LIMITS = {"min_acceleration_rate", "require_learning", "max_tie_share"}  # see `Limits`


def upstream(config: Config) -> tuple[str, ...]:
    """Names of the stages that the check reads."""
    return ("generate", "export", "train")


def identity(context: Context) -> Identity:
    """The settings but for the limits, with the content of the questions and of the assistant."""
    check_files(context.resolved)
    check = context.config.check
    fetch = not context.read_only
    unread = set(LIMITS)
    if "load" not in check.studies:
        unread.add("slo")
    settings = check.model_dump(mode="json", exclude=unread)
    if isinstance(check.prompts, Path):
        settings["prompts"] = context.digests.of(check.prompts)
    copies = context.resolved.served_copies
    if copies:
        weights = weight_files(next(iter(copies.values())), fetch=fetch)
        dtypes = {engine: copy.dtype for engine, copy in copies.items()}
        settings["served_model"] = {"weights": context.digests.of_all(weights), "dtypes": dtypes}
    else:
        settings.pop("served_model")
    assistant = context.resolved.assistant
    if assistant is not None:
        weights = weight_files(assistant, fetch=fetch)
        settings["assistant_model"] = context.digests.of_all(weights)
    return {"settings": settings}


def run(context: Context, stage: StageDirectory) -> Summary:
    """Decode with every engine that is asked for and compare the results."""
    with context.progress(stage) as progress:
        result = _decode(context, stage, progress)
        result = _with_comparisons(context, stage, result, progress)
    forget_parts(stage)
    target = context.target
    result = replace(
        result,
        configuration=context.config.model_dump(mode="json"),
        target_revision=None if is_local(target.model) else target.revision,
        passed=not result.failures(Limits.of(context.config)),
    )
    return to_json(result)


def _decode(context: Context, stage: StageDirectory, progress: ProgressReporter) -> CheckResult:
    """The figures of every engine, on the target and on the copy that will be served."""
    engines = context.config.check.engines
    request, skipped = check_request(context, progress)
    result = None
    if "native" in engines:
        result = engine_part(context, stage, request, "native", progress)
        assert result.native is not None
        result = replace(result, native=replace(result.native, skipped_prompts=skipped))
    if "vllm" in engines:
        result = with_vllm(context, stage, request, result, progress)
    assert result is not None
    result = replace(result, skipped_prompts=skipped)
    copies = context.resolved.served_copies
    if not copies:
        return result
    copy, differing = on_served_model(context, request, copies, progress)
    return replace(result, served_model=copy, differing=result.differing + differing)


def _with_comparisons(
    context: Context, stage: StageDirectory, result: CheckResult, progress: ProgressReporter
) -> CheckResult:
    """Add head 0's accuracy, the backbone's drift, exact matches and contaminated rows."""
    trained = context.upstream["train"].summary
    prompts = context.config.check.prompts
    if trained["held_out"]:
        head_0 = trained["held_out"][0]
        frequency = trained["frequency"]
        result = replace(result, head_0=head_0, frequency=frequency)
    if method_of(context.config.train).tunes_backbone:
        drift = drift_of_published(context, stage, progress)
        if drift.positions is None:
            drift = from_json(TunedDrift, trained["drift"])
        result = replace(result, drift=drift)
    if isinstance(prompts, Path):
        shards = context.upstream["generate"].shards()
        questions = read_questions(prompts)
        result = replace(
            result,
            contaminated_rows=num_contaminated(shards, CheckQuestions(questions)),
            exact_match=exact_match(read_answers(stage.path), read_references(prompts)),
        )
    return result


def configuration(stage: StageDirectory, now: Config) -> Config:
    """The configuration of the finished check and all before it; limits, `run` and `push` are those
    of `now`.
    """
    found = validate(stage.summary["configuration"], str(stage.path))
    limits = {name: getattr(now.check, name) for name in LIMITS}
    backbone = found.train.backbone.model_copy(update={"max_kl": now.train.backbone.max_kl})
    parts = {
        "run": now.run,
        "train": found.train.model_copy(update={"backbone": backbone}),
        "check": found.check.model_copy(update=limits),
        "push": now.push,
    }
    return found.model_copy(update=parts)


def one_line(summary: Summary) -> str:
    """The engines' rates, and how many greedy answers are identical."""
    result = from_json(CheckResult, summary)
    parts = []
    if result.native is not None:
        native = result.native
        line = (
            f"native: acceleration rate {native.acceleration_rate:.2f}, speedup"
            f" {native.speedup or 0:.2f}x"
        )
        parts.append(line + _shares(native))
    if result.vllm is not None:
        parts.append(f"vLLM: {result.vllm.acceleration_rate:.2f}{_shares(result.vllm)}")
    return "; ".join(parts)


def _shares(engine: EngineFigures) -> str:
    text = ""
    new = engine.new
    match = engine.greedy_match
    if engine.seen_share and new is not None:
        if new.acceleration_rate is None:
            text = f", on new answers only {new.answers} new answers"
        else:
            rate = with_error(new.acceleration_rate, new.standard_error)
            text = f", on new answers {rate}"
    return f"{text}, {match.identical}/{match.sequences} identical"


STAGE = Stage(NAME, VERSION, upstream, identity, run, one_line)
