"""What the check decodes, engine by engine. Each part's result is kept as soon as it is there: what
fails later, or is interrupted, does not cost it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.check_result import write_answers, write_model_answers
from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.seen_answers import training_text
from pipeline.artifacts.tree_file import read_calibration
from pipeline.conversations.sources import read_questions
from pipeline.errors import DataError
from pipeline.evaluation.answers import model_answers
from pipeline.evaluation.load_study import load_study
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
from pipeline.evaluation.served import chain_promise, check_served
from pipeline.evaluation.served_model import check_on_served_model
from pipeline.execution.machine import with_surroundings
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import read_tree
from pipeline.export.layout import read_layout
from pipeline.run.context import Context
from pipeline.run.resolved import ENGINE_SECTIONS
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import TargetSpec, context_length

PARTS = NATIVE, VLLM, LOAD = "native", "vllm", "load"


def check_request(context: Context, progress: ProgressReporter) -> tuple[CheckRequest, int]:
    """What is decoded, and how many prompts leave no room for it."""
    settings, export = context.config.check, context.upstream["export"].path
    target = with_room(context.backbone("export"), settings)
    prompts = _prompts(context, target, progress)
    most = read_layout(export).shape.max_depth
    request = CheckRequest(
        with_room_for(target, prompts.kept, settings.max_new_tokens, most),
        str(export),
        prompts.kept,
        settings,
        tree=read_tree(export),
        gpus=context.placement(ENGINE_SECTIONS["native"]).gpus,
        name=Path(context.config.target.model).name,
        assistant=context.resolved.assistant,
        calibration=read_calibration(context.upstream["calibrate"].path),
        trained=training_text(context.upstream["generate"]),
    )
    return request, prompts.skipped


def natively(
    context: Context, stage: StageDirectory, request: CheckRequest, progress: ProgressReporter
) -> dict[str, Any]:
    """The native result; its answers are left in the stage."""

    def decode() -> dict[str, Any]:
        arguments = {"function": check_native, "request": request}
        found = context.executor.call(
            with_surroundings, arguments, context.placement(ENGINE_SECTIONS["native"]), progress
        )
        answers = found.pop("answers")
        write_answers(stage.path, answers)
        if isinstance(request.settings.prompts, Path):
            write_model_answers(
                stage.path, {name: model_answers(lines) for name, lines in answers.items()}
            )
        return dict(found)

    return kept_part(stage, NATIVE, decode)


def in_vllm(
    context: Context,
    stage: StageDirectory,
    request: CheckRequest,
    chain: Mapping[str, Any] | None,
    progress: ProgressReporter,
) -> dict[str, Any]:
    """vLLM's result with what its chain is expected to reach; `chain` is native decoding's of the
    same text.
    """
    placement = context.placement(ENGINE_SECTIONS["vllm"])
    call, arguments = context.executor.call, {"request": replace(request, gpus=placement.gpus)}
    decoding = {"function": check_served, **arguments}
    served = kept_part(stage, VLLM, lambda: call(with_surroundings, decoding, placement, progress))
    under_load: dict[str, Any] = {}
    if "load" in request.settings.studies:
        under_load = kept_part(
            stage, LOAD, lambda: call(load_study, arguments, placement, progress)
        )
    of_one_kind = (
        not isinstance(request.settings.prompts, Path) and context.config.calibrate.data is None
    )
    assert request.calibration is not None
    promise = chain_promise(request.calibration, chain, of_one_kind=of_one_kind)
    vllm = served["vllm"] | promise | under_load
    vllm["new"] = promise.get("new", {}) | served["vllm"].get("new", {})
    return {**served, "vllm": vllm}


def kept_part(
    stage: StageDirectory, part: str, make: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """A part's result as its file has it, so that a check that was interrupted gives the same; made
    where none is.
    """
    file = stage.path / f"{part}.json"
    if read_json(file) is None:
        write_json(file, make())
    return dict(read_json(file) or {})


def forget_parts(stage: StageDirectory) -> None:
    """Remove the parts' results, which DONE.json has from now on."""
    for part in PARTS:
        (stage.path / f"{part}.json").unlink(missing_ok=True)


def on_served_model(
    context: Context,
    request: CheckRequest,
    copies: Mapping[str, TargetSpec],
    progress: ProgressReporter,
) -> dict[str, Any]:
    """The heads on the copy that will be served, in every engine of the check."""
    found: dict[str, Any] = {"differing": []}
    for engine, copy in copies.items():
        placement = context.placement(ENGINE_SECTIONS[engine])
        asked = replace(request, gpus=placement.gpus)
        arguments = {
            "function": check_on_served_model,
            "request": asked,
            "spec": copy,
            "engine": engine,
        }
        one = context.executor.call(with_surroundings, arguments, placement, progress)
        found["differing"] += one["differing"]
        found |= {
            "model": one["model"],
            "format": one["format"],
            engine: one["figures"] | {"dtype": one["dtype"]},
        }
    return found


def drift_of_published(
    context: Context, stage: StageDirectory, progress: ProgressReporter
) -> dict[str, Any]:
    """The drift of the published weights; leaves the original's answers to a file of questions."""
    settings, placement = context.config.check, context.placement(ENGINE_SECTIONS["native"])
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
    write_model_answers(stage.path, found["answers"])
    return found["drift"]


def _prompts(context: Context, target: TargetSpec, progress: ProgressReporter) -> Prompts:
    settings = context.config.check
    if isinstance(settings.prompts, Path):
        kind, where = "question", str(settings.prompts)
        native = "native" in settings.engines
        placement = context.placement(ENGINE_SECTIONS["native" if native else "vllm"])
        arguments = {
            "target": target,
            "questions": read_questions(settings.prompts),
            "settings": settings,
            "engine": "transformers" if native else "vllm",
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
            "Shorten check.max_new_tokens, raise check.max_tokens, or name other prompts in"
            " check.prompts.",
        )
    return prompts
