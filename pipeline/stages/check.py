"""check: the export decoded, natively with the tree and in vLLM as it will be served, against the
target alone.

Promises: it fails (exit 1, and push refuses) when a greedy sequence differs other than at a tie,
when vLLM accepts nothing or much less than its chain should, below `check.min_acceleration_rate`,
beyond `train.backbone.max_kl`, or where the heads guess no better than frequency would. A changed
limit is applied to the stored result without decoding again. Each engine runs in a process of its
own and decodes the same prompts; what one has decoded is kept when another fails. Native answers
are left in `answers/plain.jsonl` and, with the heads, `answers/KIND.jsonl`, in Spec-Bench's schema.
Those to a file of questions are in `model_answer/MODEL.jsonl` too, as FastChat's judge reads them,
and the original's own beside a tuned backbone's.
"""

from __future__ import annotations

from pathlib import Path

from pipeline.artifacts.check_result import CheckResult, read_answers
from pipeline.artifacts.generated_rows import num_contaminated
from pipeline.config import Config
from pipeline.config.load import validate
from pipeline.conversations.duplicates import CheckQuestions
from pipeline.conversations.sources import read_questions
from pipeline.errors import CheckFailed
from pipeline.evaluation.limits import LIMITS, failures
from pipeline.evaluation.references import exact_match, read_references
from pipeline.execution.progress import ProgressReporter
from pipeline.report.facts import on_new_answers
from pipeline.run.check_engines import (
    check_request,
    drift_of_published,
    forget_parts,
    in_vllm,
    natively,
    on_served_model,
)
from pipeline.run.checks import check_files
from pipeline.run.context import Context, Stage
from pipeline.run.reporting import publish_report
from pipeline.storage.done import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.files import is_local
from pipeline.targets.spec import weight_files
from pipeline.training.methods import method_of

NAME = "check"
VERSION = 18


def upstream(config: Config) -> tuple[str, ...]:
    """The prompts' rows, the export, and training's figures on held-out text."""
    return ("generate", "export", "train")


def identity(context: Context) -> Identity:
    """The settings but for the limits, with the content of the questions and of the assistant."""
    check_files(context.resolved)
    unread = set() if "load" in context.config.check.studies else {"slo"}
    settings = context.config.check.model_dump(mode="json", exclude=LIMITS | unread)
    if isinstance(context.config.check.prompts, Path):
        settings["prompts"] = context.digests.of(context.config.check.prompts)
    if copies := context.resolved.served_copies:
        files = weight_files(next(iter(copies.values())), fetch=not context.read_only)
        dtypes = {engine: copy.dtype for engine, copy in copies.items()}
        settings["served_model"] = {"weights": context.digests.of_all(files), "dtypes": dtypes}
    else:
        settings.pop("served_model")
    if assistant := context.resolved.assistant:
        settings["assistant_model"] = context.digests.of_all(
            weight_files(assistant, fetch=not context.read_only)
        )
    return {"settings": settings}


def run(context: Context, stage: StageDirectory) -> Summary:
    """Decode with every engine that is asked for and compare the results."""
    with context.progress(stage) as progress:
        return _decode_and_compare(context, stage, progress)


def _decode_and_compare(
    context: Context, stage: StageDirectory, progress: ProgressReporter
) -> Summary:
    settings, (request, skipped) = context.config.check, check_request(context, progress)
    result: Summary = {"skipped_prompts": skipped}
    if "native" in settings.engines:
        result |= natively(context, stage, request, progress)
        result["native"]["skipped_prompts"] = skipped
    if "vllm" in settings.engines:
        served = in_vllm(context, stage, request, result.get("native", {}).get("chain"), progress)
        differing = result.get("differing", []) + served.pop("differing")
        surroundings = {name: served[name] for name in ("hardware", "versions")}
        result = {**surroundings, **result, "vllm": served["vllm"], "differing": differing}
    if isinstance(settings.prompts, Path):
        questions = CheckQuestions(read_questions(settings.prompts))
        result["contaminated_rows"] = num_contaminated(
            context.upstream["generate"].shards(), questions
        )
    if copies := context.resolved.served_copies:
        result["served_model"] = on_served_model(context, request, copies, progress)
        result["differing"] = result.get("differing", []) + result["served_model"].pop("differing")
    trained = context.upstream["train"].summary
    if trained["held_out"]:
        result |= {"head_0": trained["held_out"][0], "frequency": trained["frequency"]}
    if method_of(context.config.train).tunes_backbone:
        drift = drift_of_published(context, stage, progress) or trained["drift"]
        result |= {"drift": drift, "kl": drift["kl"]}
    if isinstance(settings.prompts, Path):
        result["exact_match"] = exact_match(
            read_answers(stage.path), read_references(settings.prompts)
        )
    forget_parts(stage)
    return result | made_of(context) | {"passed": not failures_of(result, context.config)}


def made_of(context: Context) -> Summary:
    """What reproduces the figures: the configuration, and a Hub target's commit."""
    target = context.target
    commit = {} if is_local(target.model) else {"target_revision": target.revision}
    return {"configuration": context.config.model_dump(mode="json"), **commit}


def conclude(context: Context, stage: StageDirectory) -> None:
    """Publish the report, then hold what was found against the limits of this configuration."""
    publish_report(context)
    require_passed(stage, context.config)


def failures_of(summary: Summary, config: Config) -> list[str]:
    """What the finished check has found beyond the limits of this configuration."""
    return failures(CheckResult.of(summary), config)


def require_passed(stage: StageDirectory, config: Config) -> None:
    """Raise `CheckFailed` when what the finished check has found is beyond the limits of this
    configuration.
    """
    if found := failures_of(stage.summary, config):
        reasons = "; ".join(found)
        fix = (
            "Nothing was pushed. Sequences that differ are in DONE.json there. More data or epochs"
            " raise a low rate; where few tree sizes were timed, calibrate again with --fresh"
            " calibrate."
        )
        raise CheckFailed(f"The check failed: {reasons}.", str(stage.path), fix)


def configuration(stage: StageDirectory, now: Config) -> Config:
    """What the finished check and all before it were made by; limits, `run` and `push` are those of
    `now`.
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
    parts = []
    for name, engine in CheckResult.of(summary).engines.items():
        line = f"vLLM: {engine.acceleration_rate:.2f}"
        if name == "native":
            line = (
                f"native: acceleration rate {engine.acceleration_rate:.2f}, speedup"
                f" {engine.speedup:.2f}x"
            )
        if engine.figures.get("seen_share"):
            line += f", on new answers {on_new_answers(engine.figures)}"
        parts.append(f"{line}, {engine.identical}/{engine.sequences} identical")
    return "; ".join(parts)


STAGE = Stage(NAME, VERSION, upstream, identity, run, one_line, failures_of)
