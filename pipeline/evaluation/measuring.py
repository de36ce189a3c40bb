"""Check heads on a target, in a run or without one.

`check_with_engine` checks an export with one engine, on the target or on its served copy.
`measure_heads` checks heads of any origin without a run. Heads of other trainers are converted to
an export for native decoding. vLLM loads the original directory if it can, else the converted one.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pipeline
from pipeline.artifacts.check_result import CheckFigures, CheckResult, Limits
from pipeline.artifacts.json_form import result
from pipeline.config import CheckConfig
from pipeline.conversations.sources import read_questions
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import Choices, stock_tree
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.answers import AnswerLines
from pipeline.evaluation.drafted import require_training_text
from pipeline.evaluation.native import check_native
from pipeline.evaluation.prompts import (
    CheckRequest,
    draw_questions,
    question_prompts,
    require_prompts,
    with_room,
    with_room_for,
)
from pipeline.evaluation.served import check_served, with_expectations
from pipeline.evaluation.vllm_methods import longest_draft, require_methods
from pipeline.execution.machine import hardware, versions
from pipeline.execution.progress import SILENT, ProgressReporter
from pipeline.export.directory import read_tree, write_export
from pipeline.export.layout import CONFIG_FILE, Content, ExportLayout, read_layout
from pipeline.export.weights import DirectoryTensors, heads_directory
from pipeline.heads.foreign import Sizes, foreign_heads
from pipeline.heads.kind import TargetWeights
from pipeline.storage.atomic import read_object
from pipeline.targets.engines import EngineName
from pipeline.targets.loading import lm_head_weight, load_causal_lm
from pipeline.targets.spec import TargetSpec, load_tokenizer, model_config

BUNDLED = Path(pipeline.__file__).parent / "bundled" / "seeds.sharegpt.jsonl"
DRAFT_TOKENS = 5  # of an EAGLE model whose config.json states no number
OTHER_DRAFTS = ("peagle", "dflash", "domino", "dspark")  # in their config.json


def check_with_engine(
    request: CheckRequest, engine: str, gpus: int, progress: ProgressReporter = SILENT
) -> tuple[CheckResult, AnswerLines]:
    """Check heads with one engine; return the result, and the answers of native decoding.

    The result states hardware and versions.

    Args:
        engine: `native` or `vllm`; the answers of `vllm` are not returned.
        gpus: The number of GPUs that the engine spans; 0 is the CPU.

    Raises:
        ConfigError: Every answer ended with its first token, so there is no step to measure.
    """
    answers: AnswerLines = {}
    request = replace(request, gpus=gpus)
    if engine == "native":
        found, answers = check_native(request, progress)
    else:
        found = check_served(request, progress)
    return replace(found, hardware=hardware(), versions=versions()), answers


def join_engines(results: Mapping[str, CheckResult]) -> CheckResult:
    """Join the check results of native decoding and vLLM; return a single result as it is.

    Hardware and versions of a joined result are taken from native decoding.
    """
    native, vllm = results.get("native"), results.get("vllm")
    if native is None:
        return vllm or CheckResult()
    if vllm is None:
        return native
    return replace(native, vllm=vllm.vllm, differing=native.differing + vllm.differing)


@result
class MeasuredHeads:
    """Check figures of heads that were measured without a run."""

    heads: str
    target: str
    read_as: str
    check: CheckFigures
    hardware: dict[str, object]


@dataclass(frozen=True)
class Candidate:
    """Heads to measure: their directory, their tree, and vLLM's speculative configuration.

    Attributes:
        described: The kind of the heads, in words.
        export: A directory in an export's layout, or the original heads if only vLLM reads them.
        max_depth: The number of tokens that the heads propose in a row.
        speculative_config: vLLM's speculative configuration; None to take it from `export`.
        tree: The tree for native decoding.
    """

    described: str
    export: Path
    max_depth: int
    speculative_config: Content | None
    tree: Choices | DynamicTree = ()


def measure_heads(
    heads: str | Path,
    target: TargetSpec,
    settings: CheckConfig,
    *,
    gpus: int = 0,
    num_questions: int = 32,
    draft_tokens: int | None = None,
    progress: ProgressReporter = SILENT,
) -> tuple[MeasuredHeads, AnswerLines]:
    """Check heads of any origin on questions, with each engine of `settings`.

    Args:
        heads: A directory of heads, or a Hub id.
        settings: `prompts` is the file of questions, of which `num_questions` are
            drawn, each category in its share.
        gpus: The number of GPUs that an engine spans; 0 is the CPU.
        draft_tokens: The number of tokens that vLLM drafts; for another trainer's recurrent cell
            also the depth of its tree. By default it is read from the heads' directory.

    Returns:
        The figures, and the answers of native decoding; without it the answers are empty.

    Raises:
        ConfigError: There are no such heads, an engine cannot decode with them or with this target,
            a baseline needs a run, `check.draft_tokens` are too many, or every answer ended with
            its first token.
        DataError: The directory holds no known heads, or heads of another target; or no question
            leaves room for an answer.
        EnvironmentFault: The Hub cannot be reached, this machine cannot run the target, or a
            package that a baseline needs is missing.
    """
    require_training_text(settings, None)
    directory = heads_directory(str(heads))
    answers = {}
    results: dict[str, CheckResult] = {}
    with _candidate(directory, target, settings, draft_tokens) as found:
        require_methods(settings, found.max_depth)
        drafted = max(found.max_depth, longest_draft(settings))
        target = with_room(target, settings)
        engine: EngineName = "transformers" if "native" in settings.engines else "vllm"
        questions = draw_questions(read_questions(Path(str(settings.prompts))), num_questions)
        prompts = question_prompts(target, questions, settings, engine, gpus, progress)
        require_prompts(prompts, settings)
        request = CheckRequest(
            with_room_for(target, prompts.kept, settings.max_new_tokens, drafted),
            found.export,
            prompts.kept,
            settings,
            tree=found.tree,
            name=Path(target.model).name,
            speculative_config=found.speculative_config,
        )
        for name in sorted(settings.engines):
            results[name], lines = check_with_engine(request, name, gpus, progress)
            answers.update(lines)
    result = join_engines(results)
    if result.vllm is not None and result.native is not None:
        result = replace(
            result, vllm=with_expectations(result.vllm, result.native.chain_rate, None)
        )
    limits = Limits(
        min_rate=settings.min_acceleration_rate,
        max_tie_share=settings.max_tie_share,
        max_kl=math.inf,
    )
    measured = MeasuredHeads(
        heads=str(heads),
        target=target.model,
        read_as=found.described,
        check=result.figures(limits),
        hardware=hardware(),
    )
    return measured, answers


@contextmanager
def _candidate(
    directory: Path, target: TargetSpec, settings: CheckConfig, draft_tokens: int | None
) -> Iterator[Candidate]:
    """Context manager: prepare heads for measuring with the engines of `settings`, and yield them.

    Heads of another trainer are converted to an export in a temporary directory, unless only vLLM
    can run them. The directory is removed at the end.

    Raises:
        ConfigError, DataError: An engine of `settings` cannot decode with these heads.
    """
    text = model_config(target).get_text_config()
    config = read_object(directory / CONFIG_FILE)
    sizes = Sizes(text.hidden_size, text.vocab_size, text.num_hidden_layers)
    if "heads" in config:  # of this project
        layout = read_layout(directory)
        _require_served(layout, target, settings)
        yield _own_heads(directory, layout, sizes, draft_tokens)
        return
    _require_known_draft(config, directory)
    num_tokens = draft_tokens or proposed_tokens(config) or DRAFT_TOKENS
    model = functools.cache(lambda: load_causal_lm(target))  # only if the heads borrow a matrix
    weights = TargetWeights(
        lambda: lm_head_weight(model()), lambda: model().get_input_embeddings().weight.detach()
    )
    found = foreign_heads(DirectoryTensors(directory), weights, sizes, num_tokens)
    original = None
    if found.vllm_method is not None:
        original = {
            "method": found.vllm_method,
            "model": str(directory.resolve()),
            "num_speculative_tokens": num_tokens,
        }
    if found.heads is None:
        if "native" in settings.engines:
            raise DataError(
                f"{found.why_not}.",
                directory,
                "vLLM alone can measure it: --engine vllm.",
            )
        yield Candidate(found.description, directory, num_tokens, original)
        return
    shape = found.heads.shape
    layout = ExportLayout(
        target.model,
        shape,
        dtype=str(next(found.heads.parameters()).dtype).removeprefix("torch."),
        num_speculative_tokens=min(draft_tokens or shape.num_heads, shape.max_depth),
    )
    _require_served(layout, target, settings)
    tree = stock_tree(shape.max_depth)
    with tempfile.TemporaryDirectory(prefix="medusa-distill-check-") as temporary:
        copy = Path(temporary, "export")
        write_export(
            copy,
            found.heads,
            layout,
            target=model_config(target).to_dict(),
            tokenizer=load_tokenizer(target),
            choices=tree,
            card="",
        )
        yield Candidate(found.description, copy, shape.max_depth, original, tree)


def _require_known_draft(config: Mapping[str, Any], directory: Path) -> None:
    """Raise DataError if config.json describes a draft model of another kind."""
    named = f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
    for kind in OTHER_DRAFTS:
        if kind in named:
            raise DataError(
                f"Draft models of the kind {kind} are not supported.",
                directory,
                "Pass Medusa heads, or an EAGLE-1 or EAGLE-3 model.",
            )


def _own_heads(
    directory: Path, layout: ExportLayout, sizes: Sizes, draft_tokens: int | None
) -> Candidate:
    """Return an export of this project as heads to measure.

    Args:
        sizes: The hidden size and vocabulary of the target.
        draft_tokens: The number of tokens that vLLM drafts; None for the number in the export.

    Raises:
        ConfigError: The heads cannot propose so many tokens.
        DataError: The heads belong to a target with other sizes.
    """
    shape = layout.shape
    if (shape.hidden_size, shape.target_vocab_size) != (sizes.hidden_size, sizes.vocab_size):
        raise DataError(
            "These are heads of a target with another hidden size or vocabulary.",
            directory,
            "Give --target the model that these heads were trained on.",
        )
    config = None
    if draft_tokens is not None:
        config = layout.speculative_config(directory, draft_tokens)
    return Candidate(shape.description, directory, shape.max_depth, config, read_tree(directory))


def _require_served(layout: ExportLayout, target: TargetSpec, settings: CheckConfig) -> None:
    """Raise ConfigError if these heads are to be measured in vLLM, and vLLM cannot serve them."""
    reason = layout.kind.vllm_refusal(layout.shape, model_config(target).to_dict())
    if reason and "vllm" in settings.engines:
        raise ConfigError(reason, "--engine vllm", "Measure them natively: --engine native.")


def proposed_tokens(config: Mapping[str, Any]) -> int | None:
    """Return the number of draft tokens in config.json's `speculators_config`; None without it."""
    try:
        return int(config["speculators_config"]["proposal_methods"][0]["speculative_tokens"])
    except (LookupError, TypeError, ValueError):  # none, or JSON of another form
        return None
