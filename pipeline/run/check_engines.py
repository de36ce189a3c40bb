"""The parts of a check, each decoded by one engine on its own placement.

Each part's result is kept in a file until the check is done, so that a later failure or an
interruption does not cost it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.check_result import (
    CheckResult,
    Difference,
    ServedModel,
    Studies,
    TunedDrift,
    write_answers,
    write_model_answers,
)
from pipeline.artifacts.generated_rows import read_token_rows
from pipeline.artifacts.json_form import from_json, to_json
from pipeline.artifacts.seen_answers import training_text
from pipeline.artifacts.tree_file import read_calibration
from pipeline.conversations.sources import read_questions
from pipeline.evaluation.answers import AnswerLines
from pipeline.evaluation.measuring import joined, measure
from pipeline.evaluation.original import beside_the_original
from pipeline.evaluation.prompts import (
    CheckRequest,
    Prompts,
    held_out_prompts,
    question_prompts,
    require_prompts,
    with_room,
    with_room_for,
)
from pipeline.evaluation.served import load_study, loads_in_words, with_expectations
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import read_tree
from pipeline.export.layout import read_layout
from pipeline.run.context import Context
from pipeline.run.resolved import ENGINE_SECTIONS
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import TargetSpec, context_length, format_of, model_config

LOAD = "load"
PARTS = ("native", "vllm", LOAD)


def check_request(context: Context, progress: ProgressReporter) -> tuple[CheckRequest, int]:
    """The request for a check, and the number of prompts that leave no room for an answer."""
    settings = context.config.check
    export = context.upstream["export"].path
    target = with_room(context.backbone("export"), settings)
    prompts = _prompts(context, target, progress)
    most = read_layout(export).shape.max_depth
    request = CheckRequest(
        with_room_for(target, prompts.kept, settings.max_new_tokens, most),
        str(export),
        prompts.kept,
        settings,
        tree=read_tree(export),
        name=Path(context.config.target.model).name,
        assistant=context.resolved.assistant,
        calibration=read_calibration(context.upstream["calibrate"].path),
        trained=training_text(context.upstream["generate"]),
    )
    return request, prompts.skipped


def _prompts(context: Context, target: TargetSpec, progress: ProgressReporter) -> Prompts:
    settings = context.config.check
    generated = context.upstream["generate"]
    if isinstance(settings.prompts, Path):
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
        room = context_length(target) - settings.max_new_tokens
        rows = read_token_rows(generated.shards(), generated.fingerprint)
        prompts = held_out_prompts(rows, settings.prompts, room)
    require_prompts(prompts, settings)
    return prompts


def in_engine(
    context: Context, request: CheckRequest, engine: str, progress: ProgressReporter
) -> tuple[CheckResult, AnswerLines]:
    """One engine's part of a check, on the placement of its workers."""
    placement = context.placement(ENGINE_SECTIONS[engine])
    arguments = {"request": replace(request, gpus=placement.gpus), "engine": engine}
    return context.executor.call(measure, arguments, placement, progress)


def engine_part(
    context: Context,
    stage: StageDirectory,
    request: CheckRequest,
    engine: str,
    progress: ProgressReporter,
) -> CheckResult:
    """One engine's part as its file has it, decoded where there is none; native answers are left in
    the stage.
    """
    file = stage.path / f"{engine}.json"
    if read_json(file) is None:
        found, answers = in_engine(context, request, engine, progress)
        write_answers(stage.path, answers)
        if isinstance(request.settings.prompts, Path):
            for lines in answers.values():
                write_model_answers(stage.path, lines)
        write_json(file, to_json(found))
    return from_json(CheckResult, read_json(file))


def with_vllm(
    context: Context,
    stage: StageDirectory,
    request: CheckRequest,
    native: CheckResult | None,
    progress: ProgressReporter,
) -> CheckResult:
    """Both engines' parts, with the rate that vLLM's chain is expected to reach, and the study of
    load.
    """
    result = joined(native, engine_part(context, stage, request, "vllm", progress))
    figures = result.vllm
    calibration = request.calibration
    held_out = None
    assert figures is not None and calibration is not None
    if not isinstance(request.settings.prompts, Path) and context.config.calibrate.data is None:
        held_out = calibration.chain[calibration.num_speculative_tokens - 1]
    chain = None if result.native is None else result.native.chain
    figures = with_expectations(figures, chain, held_out)
    if "load" in request.settings.studies:
        file = stage.path / f"{LOAD}.json"
        if read_json(file) is None:
            placement = context.placement(ENGINE_SECTIONS["vllm"])
            arguments = {"request": replace(request, gpus=placement.gpus)}
            study = context.executor.call(load_study, arguments, placement, progress)
            write_json(file, to_json(study))
        load = from_json(Studies, read_json(file))
        assert load.load is not None
        figures = replace(figures, studies=load, under_load=loads_in_words(load.load))
    return replace(result, vllm=figures)


def forget_parts(stage: StageDirectory) -> None:
    """Remove the parts' results, which DONE.json has from now on."""
    for part in PARTS:
        (stage.path / f"{part}.json").unlink(missing_ok=True)


def on_served_model(
    context: Context,
    request: CheckRequest,
    copies: Mapping[str, TargetSpec],
    progress: ProgressReporter,
) -> tuple[ServedModel, list[Difference]]:
    """The heads on the copy that will be served, in every engine of the check.

    Greedy text is compared with that copy alone, whose own text differs from the full target's.
    Neither baselines nor studies are repeated.
    """
    parts: dict[str, CheckResult] = {}
    plain: dict[str, Any] = {"baselines": (), "assistant_model": None, "studies": ()}
    settings = request.settings.model_copy(update=plain)
    differing = []
    for engine, copy in copies.items():
        copy = replace(copy, max_tokens=request.target.max_tokens)
        asked = replace(request, target=copy, settings=settings, assistant=None)
        parts[engine], _ = in_engine(context, asked, engine, progress)
        differing += [replace(each, model=copy.model) for each in parts[engine].differing]
    copy = next(iter(copies.values()))
    found = ServedModel(
        model=copy.model,
        format=format_of(model_config(copy)) or "not quantized",
        native=parts.get("native", CheckResult()).native,
        vllm=parts.get("vllm", CheckResult()).vllm,
    )
    return found, differing


def drift_of_published(
    context: Context, stage: StageDirectory, progress: ProgressReporter
) -> TunedDrift:
    """The drift of the published weights; leaves the original's answers to a file of questions."""
    settings = context.config.check
    placement = context.placement(ENGINE_SECTIONS["native"])
    generated = context.upstream["generate"]
    rows = read_token_rows(generated.shards(), generated.fingerprint)
    arguments = {
        "original": with_room(context.target, settings),
        "published": with_room(context.backbone("export"), settings),
        "rows": [row for row in rows if row.split == "calibrate"],
        "questions": [],
        "settings": settings,
        "gpus": placement.gpus,
        "name": Path(context.config.target.model).name,
    }
    if isinstance(settings.prompts, Path):
        arguments["questions"] = read_questions(settings.prompts)
    drift, lines = context.executor.call(beside_the_original, arguments, placement, progress)
    write_model_answers(stage.path, lines)
    return drift
