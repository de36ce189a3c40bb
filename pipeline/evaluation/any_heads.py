"""Any heads measured on a target, without a run: the check's figures for exports and for heads of
other trainers.

Heads of this project are decoded as they lie. Others are read by `export/foreign.py` and decoded
natively from a copy in an export's layout; vLLM gets the original where it reads it unmodified, and
the copy where it does not.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pipeline
from pipeline.artifacts.check_result import CheckResult
from pipeline.config import CheckConfig
from pipeline.conversations.readers import read_questions
from pipeline.decoding.tree import stock_tree
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.limits import engine_failures
from pipeline.evaluation.native import check_native
from pipeline.evaluation.prompts import (
    CheckRequest,
    Prompt,
    question_prompts,
    with_room,
    with_room_for,
)
from pipeline.evaluation.served import check_served
from pipeline.execution.hardware import hardware
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import read_tree, write_export
from pipeline.export.layout import CONFIG_FILE, ExportLayout, read_layout
from pipeline.export.weights import DirectoryTensors
from pipeline.heads.kind import TargetWeights
from pipeline.heads.kinds import ForeignHeads, Sizes, foreign_heads
from pipeline.heads.shapes import HeadsShape
from pipeline.storage.atomic import read_object
from pipeline.targets.loading import lm_head_weight, load_causal_lm, require_readable
from pipeline.targets.spec import TargetSpec, load_tokenizer, model_config
from pipeline.targets.vllm_engine import in_vllm

BUNDLED = Path(pipeline.__file__).parents[1] / "data" / "seeds.sharegpt.jsonl"
DRAFT_TOKENS = 5  # of a cell whose directory does not say


@dataclass(frozen=True)
class Candidate:
    """Heads to be measured: a directory in an export's layout, and how vLLM drafts with them.

    Attributes:
        export: None where native decoding cannot have them.
        speculative_config: None where vLLM reads `export`.
    """

    described: str
    export: Path | None
    speculative_config: dict[str, Any] | None
    max_depth: int
    why_not: str = ""


def measure_heads(
    directory: Path,
    target: TargetSpec,
    settings: CheckConfig,
    *,
    gpus: int = 0,
    num_prompts: int = 32,
    draft_tokens: int | None = None,
    progress: ProgressReporter | None = None,
) -> dict[str, Any]:
    """Decode questions with the heads of `directory` and without, in each engine of `settings`.

    Args:
        settings: `prompts` is the file of questions, of which the first `num_prompts` are asked.
        draft_tokens: How many tokens vLLM drafts, and how deep the tree of a cell of another
            trainer is; by default what the directory says.

    Returns:
        {"target", "read_as", "check": as in report.json, with "passed" and "failures", "hardware",
        "answers": of native decoding, as the lines of one file per method}.

    Raises:
        ConfigError: No answer took a step, or an engine cannot have these heads or this target.
        DataError: The directory holds no heads that are known, or those of another target; no
            question fits.
    """
    for engine in settings.engines:
        require_readable(target, engine, on_gpu=gpus > 0, where="--target")
    with _candidate(directory, target, draft_tokens) as found:
        _require_engines(found, directory, target, settings)
        target = with_room(target, settings)
        prompts = _prompts(target, settings, gpus, num_prompts, progress)
        target = with_room_for(target, prompts, settings.max_new_tokens, found.max_depth)
        request = CheckRequest(
            target,
            str(found.export or directory),
            prompts,
            settings,
            tree=_tree(found),
            gpus=gpus,
            name=Path(target.model).name,
            speculative_config=found.speculative_config,
        )
        result = _decoded(request, progress)
    failures = engine_failures(CheckResult.of(result), settings)
    engines = {name: result[name] for name in ("native", "vllm") if name in result}
    return {
        "target": target.model,
        "read_as": found.described,
        "check": {**engines, "passed": not failures, "failures": failures},
        "hardware": hardware(),
        "answers": result.get("answers", {}),
    }


def _decoded(request: CheckRequest, progress: ProgressReporter | None) -> dict[str, Any]:
    """Each engine's result; what the same chain reached natively on the same text is expected of
    vLLM.
    """
    result: dict[str, Any] = {}
    if "native" in request.settings.engines:
        result |= check_native(request, progress)
    if "vllm" in request.settings.engines:
        expected = {}
        if chain := result.get("native", {}).get("chain"):
            expected["same_text_acceleration_rate"] = chain["acceleration_rate"]
        target = in_vllm(request.target, on_gpu=request.gpus > 0)
        result["vllm"] = check_served(replace(request, target=target), progress)["vllm"] | expected
    return result


@contextmanager
def _candidate(
    directory: Path, target: TargetSpec, draft_tokens: int | None
) -> Iterator[Candidate]:
    text = model_config(target).get_text_config()
    sizes = Sizes(text.hidden_size, text.vocab_size)
    config = read_object(directory / CONFIG_FILE)
    if "heads" in config:  # of this project
        layout = read_layout(directory)
        _require_sizes(layout.shape, sizes, directory)
        deepest = layout.shape.max_depth
        yield Candidate(
            layout.shape.described(), directory, _drafting(layout, directory, draft_tokens), deepest
        )
        return
    num_tokens = draft_tokens or proposed_tokens(config) or DRAFT_TOKENS
    tensors = DirectoryTensors(directory)
    found = foreign_heads(tensors, _matrices(target), sizes, num_tokens)
    original = {
        "method": found.vllm_method,
        "model": str(directory.resolve()),
        "num_speculative_tokens": num_tokens,
    }
    with tempfile.TemporaryDirectory(prefix="medusa-distill-check-") as temporary:
        copy = _copied(found, target, Path(temporary, "export"), draft_tokens)
        depth = found.heads.shape.max_depth if found.heads else num_tokens
        yield Candidate(
            found.described, copy, original if found.as_they_are else None, depth, found.why_not
        )


def _drafting(
    layout: ExportLayout, directory: Path, draft_tokens: int | None
) -> dict[str, Any] | None:
    """How vLLM is started with an export: so many draft tokens, or, for None, alone as the export
    says.
    """
    if draft_tokens and draft_tokens > layout.shape.max_depth:
        what = (
            f"These heads propose {layout.shape.max_depth} tokens ahead, and {draft_tokens} are to"
            " be drafted."
        )
        raise ConfigError(what, "--draft-tokens", f"Give at most {layout.shape.max_depth}.")
    return (
        layout.kind.speculative_config(str(directory.resolve()), draft_tokens)
        if draft_tokens
        else None
    )


def _matrices(target: TargetSpec) -> TargetWeights:
    """The target's matrices; the model is loaded when the first of them is asked for."""
    model = functools.cache(lambda: load_causal_lm(target))
    return TargetWeights(
        lambda: lm_head_weight(model()), lambda: model().get_input_embeddings().weight.detach()
    )


def _copied(
    found: ForeignHeads, target: TargetSpec, directory: Path, draft_tokens: int | None
) -> Path | None:
    """The heads as an export, where they can be; the layout names each lm_head that is stored."""
    if found.heads is None:
        return None
    shape = found.heads.shape
    num_tokens = min(draft_tokens or shape.num_heads, shape.max_depth)
    layout = ExportLayout(
        target.model, shape, dtype=_dtype(found), num_speculative_tokens=num_tokens
    )
    write_export(
        directory,
        found.heads,
        layout,
        target=model_config(target).to_dict(),
        tokenizer=load_tokenizer(target),
        choices=stock_tree(shape.max_depth),
        card="",
    )
    return directory


def _dtype(found: ForeignHeads) -> str:
    assert found.heads is not None
    return str(next(iter(found.heads.parameters())).dtype).removeprefix("torch.")


def _require_engines(
    found: Candidate, directory: Path, target: TargetSpec, settings: CheckConfig
) -> None:
    """Refuse engines that cannot have these heads, before anything is decoded."""
    if found.export is None and "native" in settings.engines:
        raise DataError(
            f"{found.why_not}.", str(directory), "vLLM alone can measure it: --engine vllm."
        )
    if found.export is not None and "vllm" in settings.engines:
        layout = read_layout(found.export)
        if reason := layout.kind.not_served(layout.shape, model_config(target).to_dict()):
            raise ConfigError(reason, "--engine vllm", "Measure them natively: --engine native.")


def _tree(found: Candidate) -> Any:
    return read_tree(found.export) if found.export else ()


def _prompts(
    target: TargetSpec,
    settings: CheckConfig,
    gpus: int,
    number: int,
    progress: ProgressReporter | None,
) -> list[Prompt]:
    path = Path(settings.prompts) if isinstance(settings.prompts, str | Path) else BUNDLED
    if not path.is_file():
        raise ConfigError(
            f"There is no file of questions {path}.", "--prompts", "Name one with --prompts FILE."
        )
    engine: Any = "transformers" if "native" in settings.engines else "vllm"
    questions = read_questions(path)[:number]
    found = question_prompts(target, questions, settings, engine, gpus, progress)
    if not found.kept:
        what = (
            f"No question leaves room for {settings.max_new_tokens} tokens in the target's context."
        )
        raise DataError(
            what, str(path), "Shorten --max-new-tokens, or name other questions with --prompts."
        )
    return found.kept


def _require_sizes(shape: HeadsShape, sizes: Sizes, directory: Path) -> None:
    if (shape.hidden_size, shape.target_vocab_size) != (sizes.hidden_size, sizes.vocab_size):
        what = (
            f"These are heads of a target with states of {shape.hidden_size} numbers and a"
            f" vocabulary of {shape.target_vocab_size} tokens; this one has {sizes.hidden_size} and"
            f" {sizes.vocab_size}."
        )
        raise DataError(
            what, str(directory), "Give --target the model that these heads were trained on."
        )


def proposed_tokens(config: dict[str, Any]) -> int | None:
    """How many tokens a speculators configuration says to draft."""
    try:
        number = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (LookupError, TypeError):  # none, or JSON of another form
        return None
    return number if type(number) is int and number > 0 else None
