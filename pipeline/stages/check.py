"""check: the export decoded, natively with the tree and in vLLM as it will be served, against the target alone.

Promises: it fails (exit 1, and push refuses) when a greedy sequence differs other than at a tie, when vLLM accepts
nothing, or below `check.min_acceleration_rate`. Each engine runs in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.checking.native import check_native
from pipeline.checking.prompts import Prompts, held_out_prompts, question_prompts
from pipeline.checking.served import check_served
from pipeline.conversations.template import ChatTemplate
from pipeline.errors import CheckFailed, DataError
from pipeline.execution.context import Context
from pipeline.execution.hardware import with_hardware
from pipeline.execution.preflight import require_questions
from pipeline.storage.durable import read_json
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.spec import context_length, load_tokenizer

NAME = "check"
VERSION = 1
UPSTREAM = ("generate", "export")


def identity(context: Context) -> dict[str, Any]:
    """Everything that is asked, the questions' content among it."""
    require_questions(context.config)
    settings = context.config.check.model_dump(mode="json")
    if isinstance(context.config.check.prompts, Path):
        settings["prompts"] = context.digests.of(context.config.check.prompts)
    return {"settings": settings}


def run(context: Context, stage: StageDirectory) -> dict[str, Any]:
    """Decode with every engine that is asked for and judge the results."""
    settings, target = context.config.check, context.target
    export = context.upstream["export"].path
    choices = [tuple(path) for path in read_json(export / "medusa_choices.json") or ()]
    prompts = _prompts(context)
    placement = context.placement("features")
    shared = {
        "target": target,
        "export": str(export),
        "prompts": prompts.kept,
        "settings": settings,
        "gpus": placement.gpus,
    }
    result: dict[str, Any] = {"skipped_prompts": prompts.skipped}
    if "native" in settings.engines:
        result |= context.executor.call(
            with_hardware, {"function": check_native, **shared, "choices": choices}, placement
        )
        result["native"]["skipped_prompts"] = prompts.skipped
    if "vllm" in settings.engines:
        heads = context.config.train.num_heads
        placement = context.placement("generate")
        arguments = {"function": check_served, **shared, "gpus": placement.gpus, "num_heads": heads}
        served = context.executor.call(with_hardware, arguments, placement)
        result = {"hardware": served["hardware"], **result, "vllm": served["vllm"]}
        result["differing"] = result.get("differing", []) + served["differing"]
    result["failures"] = failures(result, settings.min_acceleration_rate)
    return result | {"passed": not result["failures"]}


def failures(result: dict[str, Any], min_acceleration_rate: float) -> list[str]:
    """Why these heads must not be published; nothing when they may."""
    found = []
    for engine in ("native", "vllm"):
        if engine not in result:
            continue
        match, rate = result[engine]["greedy_match"], result[engine]["acceleration_rate"]
        differing = match["sequences"] - match["identical"] - match["ties"]
        if differing:
            found.append(f"{engine}: {differing} of {match['sequences']} greedy sequences differ from plain decoding")
        if rate < min_acceleration_rate:
            least = f"check.min_acceleration_rate = {min_acceleration_rate:.2f}"
            found.append(f"{engine}: acceleration rate {rate:.2f} is below {least}")
    if "vllm" in result and not any(result["vllm"]["accepted_per_position"]):
        found.append("vllm: it accepted no drafted token")
    return found


def verdict(stage: StageDirectory) -> None:
    """Raise `CheckFailed` when the finished check says no."""
    if stage.summary.get("failures"):
        reasons = "; ".join(stage.summary["failures"])
        fix = "Sequences that differ are in DONE.json there; more data or epochs raise acceptance. Nothing was pushed."
        raise CheckFailed(f"The check failed: {reasons}.", str(stage.path), fix)


def one_line(summary: dict[str, Any]) -> str:
    parts = []
    if native := summary.get("native"):
        speed = f"acceleration rate {native['acceleration_rate']:.2f}, speedup {native['speedup']:.2f}x"
        parts.append(f"native: {speed}, {_identical(native)}")
    if served := summary.get("vllm"):
        parts.append(f"vLLM: {served['acceleration_rate']:.2f}, {_identical(served)}")
    return "; ".join(parts)


def _identical(engine: dict[str, Any]) -> str:
    return f"{engine['greedy_match']['identical']}/{engine['greedy_match']['sequences']} identical"


def _prompts(context: Context) -> Prompts:
    settings, target = context.config.check, context.target
    room = context_length(target) - settings.max_new_tokens
    if isinstance(settings.prompts, Path):
        template = ChatTemplate(load_tokenizer(target), target.chat_template)
        return question_prompts(settings.prompts, template, room)
    prompts = held_out_prompts(context.upstream["generate"].shards(), settings.prompts, room)
    if not prompts.kept:
        fix = "Shorten check.max_new_tokens, or name a file of questions in check.prompts."
        raise DataError(
            f"No held-out prompt leaves room for {settings.max_new_tokens} tokens in the target's context.",
            "check.prompts",
            fix,
        )
    return prompts
