"""check: the export decoded, natively with the tree and in vLLM as it will be served, against the target alone.

Promises: it fails (exit 1, and push refuses) when a greedy sequence differs other than at a tie, when vLLM accepts
nothing or much less than its chain should, below `check.min_acceleration_rate`, beyond `train.backbone.max_kl`, or
where the heads guess no better than frequency would. A changed limit is applied to the stored result without decoding
again. Each engine runs in a process of its own and decodes the same prompts; the native result is kept when vLLM fails.
Native answers are left in `answers/plain.jsonl` and, with the heads, `answers/KIND.jsonl`, in Spec-Bench's schema.
Those to a file of questions are in `model_answer/MODEL.jsonl` too, as FastChat's judge reads them, and the original's
own beside a tuned backbone's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.check_result import CheckResult, read_answers, write_answers, write_judged
from pipeline.artifacts.generated_rows import num_contaminated, read_token_rows
from pipeline.artifacts.tree_file import read_calibration
from pipeline.config import Config
from pipeline.conversations.duplicates import CheckQuestions
from pipeline.conversations.readers import read_questions
from pipeline.errors import CheckFailed, DataError
from pipeline.evaluation.answers import judged_lines
from pipeline.evaluation.limits import failures
from pipeline.evaluation.native import check_native
from pipeline.evaluation.original import OriginalRequest, beside_the_original
from pipeline.evaluation.prompts import (
    CheckRequest,
    Prompts,
    held_out_prompts,
    question_prompts,
    with_room,
    with_room_for,
)
from pipeline.evaluation.references import exact_match, read_references
from pipeline.evaluation.served import chain_promise, check_served
from pipeline.evaluation.served_model import check_on_served_model, served_model
from pipeline.execution.hardware import with_hardware
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import read_tree
from pipeline.export.layout import read_layout
from pipeline.run.context import Context
from pipeline.run.preflight import require_files, resolve_assistant
from pipeline.run.reporting import publish_report
from pipeline.run.stage import Stage
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.done import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import TargetSpec, context_length, weight_files
from pipeline.training.methods import method_of

NAME = "check"
VERSION = 11

LIMITS = {"min_acceleration_rate", "require_learning", "max_tie_share"}
NATIVE_FILE = "native.json"  # until vLLM has come to its end as well


def upstream(config: Config) -> tuple[str, ...]:
    """The prompts' rows, the export, and training's figures on held-out text."""
    return ("generate", "export", "train")


def identity(context: Context) -> Identity:
    """The settings but for the limits, with the content of the questions and of the assistant."""
    require_files(context.config)
    unread = set() if "load" in context.config.check.studies else {"slo"}
    settings = context.config.check.model_dump(mode="json", exclude=LIMITS | unread)
    if isinstance(context.config.check.prompts, Path):
        settings["prompts"] = context.digests.of(context.config.check.prompts)
    if copy := served_model(context.config, context.target, on_gpu=context.on_gpu):
        files = weight_files(copy, fetch=not context.read_only)
        settings["served_model"] = {"weights": context.digests.of_all(files), "dtype": copy.dtype}
    else:
        settings.pop("served_model")
    if assistant := _assistant(context):
        settings["assistant_model"] = context.digests.of_all(weight_files(assistant, fetch=not context.read_only))
    return {"settings": settings}


def run(context: Context, stage: StageDirectory) -> Summary:
    """Decode with every engine that is asked for and judge the results."""
    with context.progress(stage, "prompts") as progress:
        return _decode_and_judge(context, stage, progress)


def _decode_and_judge(context: Context, stage: StageDirectory, progress: ProgressReporter) -> Summary:
    settings, (request, skipped) = context.config.check, _request(context, progress)
    result: Summary = {"skipped_prompts": skipped}
    if "native" in settings.engines:
        result |= _natively(context, stage, request, progress)
        result["native"]["skipped_prompts"] = skipped
    if "vllm" in settings.engines:
        served = _in_vllm(context, request, result.get("native", {}).get("chain"), progress)
        differing = result.get("differing", []) + served.pop("differing")
        result = {"hardware": served["hardware"], **result, "vllm": served["vllm"], "differing": differing}
    if isinstance(settings.prompts, Path):
        questions = CheckQuestions(read_questions(settings.prompts))
        result["contaminated_rows"] = num_contaminated(context.upstream["generate"].shards(), questions)
    if copy := served_model(context.config, context.target, on_gpu=context.on_gpu):
        result["served_model"] = _on_served_model(context, request, copy, progress)
        result["differing"] = result.get("differing", []) + result["served_model"].pop("differing")
    trained = context.upstream["train"].summary
    if trained["held_out"]:
        result |= {"head_0": trained["held_out"][0], "frequency": trained["frequency"]}
    if method_of(context.config.train).tunes_backbone:
        drift = _beside_the_original(context, stage, progress) or trained["drift"]
        result |= {"drift": drift, "kl": drift["kl"]}
    if isinstance(settings.prompts, Path):
        result["exact_match"] = exact_match(read_answers(stage.path), read_references(settings.prompts))
    (stage.path / NATIVE_FILE).unlink(missing_ok=True)
    return result | {"passed": not failures_of(result, context.config)}


def _request(context: Context, progress: ProgressReporter) -> tuple[CheckRequest, int]:
    """What is decoded, and how many prompts leave no room for it."""
    settings, export = context.config.check, context.upstream["export"].path
    target = with_room(context.backbone("export"), settings)
    prompts = _prompts(context, target, progress)
    drafted = read_layout(export).shape.max_depth  # vLLM drafts beyond the end
    request = CheckRequest(
        with_room_for(target, prompts.kept, settings.max_new_tokens + drafted + 1),
        str(export),
        prompts.kept,
        settings,
        tree=read_tree(export),
        gpus=context.placement("features").gpus,
        name=Path(context.config.target.model).name,
        assistant=_assistant(context),
        calibration=read_calibration(context.upstream["calibrate"].path),
    )
    return request, prompts.skipped


def _natively(
    context: Context, stage: StageDirectory, request: CheckRequest, progress: ProgressReporter
) -> dict[str, Any]:
    """The native result, or what an interrupted check has left of it."""
    native = read_json(stage.path / NATIVE_FILE)
    if native is None:
        arguments = {"function": check_native, "request": request}
        native = context.executor.call(with_hardware, arguments, context.placement("features"), progress)
        answers = native.pop("answers")
        write_answers(stage.path, answers)
        if isinstance(request.settings.prompts, Path):
            write_judged(stage.path, {name: judged_lines(lines) for name, lines in answers.items()})
        write_json(stage.path / NATIVE_FILE, native)
    return dict(native)


def _in_vllm(
    context: Context, request: CheckRequest, chain: Mapping[str, Any] | None, progress: ProgressReporter
) -> dict[str, Any]:
    """vLLM's result with what its chain is expected to reach; `chain` is native decoding's of the same text."""
    placement = context.placement("generate")
    arguments = {"function": check_served, "request": replace(request, gpus=placement.gpus)}
    served = context.executor.call(with_hardware, arguments, placement, progress)
    of_one_kind = not isinstance(request.settings.prompts, Path) and context.config.calibrate.data is None
    assert request.calibration is not None
    promise = chain_promise(request.calibration, chain, len(request.prompts) if of_one_kind else None)
    return {**served, "vllm": served["vllm"] | promise}


def _on_served_model(
    context: Context, request: CheckRequest, copy: TargetSpec, progress: ProgressReporter
) -> dict[str, Any]:
    """The heads on the copy that will be served, in every engine of the check."""
    found: dict[str, Any] = {"differing": []}
    for engine in context.config.check.engines:
        placement = context.placement("features" if engine == "native" else "generate")
        asked = replace(request, gpus=placement.gpus)
        arguments = {"function": check_on_served_model, "request": asked, "spec": copy, "engine": engine}
        one = context.executor.call(with_hardware, arguments, placement, progress)
        found["differing"] += one["differing"]
        found |= {"model": one["model"], "format": one["format"], engine: one["figures"] | {"dtype": one["dtype"]}}
    return found


def _beside_the_original(context: Context, stage: StageDirectory, progress: ProgressReporter) -> dict[str, Any]:
    """The drift of the published weights; leaves the original's answers to a file of questions."""
    settings, placement = context.config.check, context.placement("features")
    generated = context.upstream["generate"]
    rows = read_token_rows(generated.shards(), generated.fingerprint)
    request = OriginalRequest(
        with_room(context.target, settings),
        with_room(context.backbone("export"), settings),
        [row for row in rows if row.split == "calibrate"],
        read_questions(settings.prompts) if isinstance(settings.prompts, Path) else [],
        settings,
        placement.gpus,
        Path(context.config.target.model).name,
    )
    found = context.executor.call(beside_the_original, {"request": request}, placement, progress)
    write_judged(stage.path, found["answers"])
    return found["drift"]


def conclude(context: Context, stage: StageDirectory) -> None:
    """Publish the report, then judge what was found by the limits of this configuration."""
    publish_report(context)
    require_passed(stage, context.config)


def failures_of(summary: Summary, config: Config) -> list[str]:
    """What the finished check has found beyond the limits of this configuration."""
    return failures(CheckResult.of(summary), config)


def require_passed(stage: StageDirectory, config: Config) -> None:
    """Raise `CheckFailed` when what the finished check has found is beyond the limits of this configuration."""
    if found := failures_of(stage.summary, config):
        reasons = "; ".join(found)
        fix = (
            "Nothing was pushed. Sequences that differ are in DONE.json there. More data or epochs raise a low rate; "
            "where few tree sizes were timed, calibrate again with --fresh calibrate."
        )
        raise CheckFailed(f"The check failed: {reasons}.", str(stage.path), fix)


def one_line(summary: Summary) -> str:
    parts = []
    for name, engine in CheckResult.of(summary).engines.items():
        rate, identical = f"{engine.acceleration_rate:.2f}", f"{engine.identical}/{engine.sequences} identical"
        speed = (
            f"native: acceleration rate {rate}, speedup {engine.speedup:.2f}x" if name == "native" else f"vLLM: {rate}"
        )
        parts.append(f"{speed}, {identical}")
    return "; ".join(parts)


def _prompts(context: Context, target: TargetSpec, progress: ProgressReporter) -> Prompts:
    settings = context.config.check
    if isinstance(settings.prompts, Path):
        kind, where = "question", str(settings.prompts)
        engine, part = ("transformers", "features") if "native" in settings.engines else ("vllm", "generate")
        placement = context.placement(part)
        arguments = {
            "target": target,
            "questions": read_questions(settings.prompts),
            "settings": settings,
            "engine": engine,
            "gpus": placement.gpus,
        }
        prompts = context.executor.call(question_prompts, arguments, placement, progress)
    else:
        kind, where = "held-out prompt", "check.prompts"
        room = context_length(target) - settings.max_new_tokens
        generated = context.upstream["generate"]
        rows = read_token_rows(generated.shards(), generated.fingerprint)
        prompts = held_out_prompts(rows, settings.prompts, room)
    if not prompts.kept:
        raise DataError(
            f"No {kind} leaves room for {settings.max_new_tokens} tokens in the target's context.",
            where,
            "Shorten check.max_new_tokens, raise check.max_tokens, or name other prompts in check.prompts.",
        )
    return prompts


def _assistant(context: Context) -> TargetSpec | None:
    model = context.config.check.assistant_model
    return replace(resolve_assistant(model), dtype=context.target.dtype) if model else None


STAGE = Stage(
    NAME, VERSION, upstream, identity, run, one_line, conclude, failures_of, placements=("features", "generate")
)
