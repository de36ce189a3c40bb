"""check: decode with the export, natively and in vLLM, and compare with plain decoding.

The check fails (exit code 1, and nothing is pushed) in any of these cases:

- A greedy answer differs from plain decoding other than at a tie, or too many differ at ties.
- vLLM accepts no draft token, or its acceleration rate is far below that expected of its chain.
- An acceleration rate is below `check.min_acceleration_rate`.
- The drift of a tuned backbone is above `train.backbone.max_kl`.
- Head 0 guesses hardly better than always guessing the most frequent tokens.

A changed limit is applied to the stored result without decoding again. All engines decode the same
prompts. The result of one engine is kept if another one fails.

`answers/plain.jsonl` and `answers/KIND.jsonl` hold the native answers without and with heads, in
Spec-Bench's schema, which FastChat's judge reads too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.artifacts.check_result import (
    CheckResult,
    Limits,
    ServedModel,
    Studies,
    TunedDrift,
    VllmFigures,
)
from pipeline.artifacts.generated_rows import TokenRow, num_contaminated, read_token_rows
from pipeline.artifacts.json_form import from_json, to_json
from pipeline.artifacts.seed_rows import read_categories
from pipeline.artifacts.seen_answers import training_text
from pipeline.artifacts.tree_file import read_calibration
from pipeline.config import Config
from pipeline.config.load import validate
from pipeline.conversations.conversation import Conversation
from pipeline.conversations.duplicates import CheckQuestions
from pipeline.conversations.sources import read_questions
from pipeline.evaluation.answer_files import write_answers
from pipeline.evaluation.measuring import AnswerLines, check_with_engine, join_engines
from pipeline.evaluation.original import drift_answers, published_drift
from pipeline.evaluation.prompts import (
    CheckRequest,
    Prompts,
    held_out_prompts,
    question_prompts,
    require_prompts,
    with_room,
    with_room_for,
)
from pipeline.evaluation.served import load_study, with_expectations
from pipeline.evaluation.vllm_methods import longest_draft
from pipeline.execution.progress import ProgressReporter
from pipeline.export.directory import read_tree
from pipeline.export.layout import read_layout
from pipeline.run.checks import check_prompts_file
from pipeline.run.context import Context, Stage, reads
from pipeline.run.resolved import ENGINE_SECTIONS
from pipeline.storage.atomic import read_json, write_json
from pipeline.storage.receipts import Identity, Summary
from pipeline.storage.stage_directory import StageDirectory
from pipeline.targets.files import is_local
from pipeline.targets.spec import (
    TargetSpec,
    context_length,
    model_config,
    quantization_format,
)
from pipeline.training.methods import method_of

NAME = "check"
VERSION = 33
FIGURES = {
    "native.acceleration_rate": "native acceleration rate",
    "native.speedup": "native speedup",
    "vllm.acceleration_rate": "vLLM acceleration rate",
}
LIMITS = {"min_acceleration_rate", "max_tie_share"}  # see `Limits`


def identity(context: Context) -> Identity:
    """Return what the check stage's result depends on: settings, and hashes of files.

    Limits are left out. The files are the questions, and the weights of a served model and of an
    assistant.
    """
    check_prompts_file(context.resolved)
    check = context.config.check
    settings = check.model_dump(mode="json", exclude=LIMITS)
    if isinstance(check.prompts, Path):
        settings["prompts"] = context.digests.of(check.prompts)
    copies = context.resolved.served_copies
    if copies:
        weights = context.weights_identity(next(iter(copies.values())))
        dtypes = {engine: copy.dtype for engine, copy in copies.items()}
        settings["served_model"] = {"weights": weights, "dtypes": dtypes}
    assistant = context.resolved.assistant
    if assistant is not None:
        settings["assistant_model"] = context.weights_identity(assistant)
    return {"settings": settings}


@dataclass(frozen=True)
class CheckEngines:
    """Runner of the check's measurements, on the workers of each engine."""

    context: Context
    stage: StageDirectory
    progress: ProgressReporter
    questions: list[Conversation] | None  # of a file of questions; None for held-out prompts

    def call(self, function: Callable[..., Any], engine: str, /, **arguments: Any) -> Any:
        """Call a function on a worker of one engine, and return its result.

        The function also receives the arguments `gpus` and `progress`.
        """
        return self.context.call(function, ENGINE_SECTIONS[engine], self.progress, **arguments)

    def measure(self, request: CheckRequest, engine: str) -> tuple[CheckResult, AnswerLines]:
        """Check the heads with one engine; return the result and the answers.

        The answers are empty unless the engine is native.
        """
        return self.call(check_with_engine, engine, request=request, engine=engine)

    def prompts(self, target: TargetSpec) -> Prompts:
        """Build the prompts that `check.prompts` describes; raise DataError if no prompt fits."""
        settings = self.context.config.check
        if isinstance(settings.prompts, int):
            room = context_length(target) - settings.max_new_tokens
            categories = read_categories(self.context.upstream["seeds"].shards())
            rows = _generated_rows(self.context)
            prompts = held_out_prompts(rows, settings.prompts, room, categories=categories)
        else:
            engine = settings.engines[0]
            prompts = self.call(
                question_prompts,
                engine,
                target=target,
                questions=self.questions,
                settings=settings,
                engine="transformers" if engine == "native" else "vllm",
            )
        require_prompts(prompts, settings)
        return prompts

    def stored_result(self, request: CheckRequest, engine: str) -> CheckResult:
        """Return one engine's result: the stored one, or else a measured one.

        A measured result is stored in the stage directory, with the answers.
        """
        file = self.stage.path / f"{engine}.json"
        stored = read_json(file)
        if stored is not None:
            return from_json(CheckResult, stored)
        result, answers = self.measure(request, engine)
        write_answers(self.stage.path, answers)
        write_json(file, to_json(result))
        return result

    def vllm_figures(self, request: CheckRequest, result: CheckResult) -> VllmFigures:
        """Return vLLM's figures with expected rates and, if configured, the study `load`.

        The rate that calibration expects is added only if the check uses held-out rows. The rate
        of the same chain on the same text is added only if native decoding was checked too.
        """
        held_out, chain = None, None
        assert result.vllm is not None
        if result.native is not None:
            chain = result.native.chain_rate
        if self.questions is None:
            calibration = read_calibration(self.context.upstream["calibrate"].path)
            held_out = calibration.chain[calibration.num_speculative_tokens - 1]
        figures = with_expectations(result.vllm, chain, held_out)
        if "load" in request.settings.studies:
            load, failed = self.call(load_study, "vllm", request=request)
            figures = replace(figures, studies=Studies(load=load), failed_loads=failed or None)
        return figures

    def with_served_model(self, request: CheckRequest, result: CheckResult) -> CheckResult:
        """Repeat the check on the served copy of the target; add the copy's figures to the result.

        Greedy answers are compared with plain decoding of that copy, since the target itself writes
        other text. Baselines and studies are not repeated.
        """
        nothing = dict.fromkeys(("baselines", "engine_baselines", "draft_tokens", "studies"), ())
        settings = request.settings.model_copy(update=nothing)
        results = {}
        for engine, copy in self.context.resolved.served_copies.items():
            target = replace(copy, max_tokens=request.target.max_tokens)
            asked = replace(request, target=target, settings=settings)
            results[engine], _ = self.measure(asked, engine)
        found = join_engines(results)
        form = quantization_format(model_config(target)) or "not quantized"
        served = ServedModel(model=target.model, format=form, native=found.native, vllm=found.vllm)
        differing = [replace(each, model=target.model) for each in found.differing]
        return replace(result, served_model=served, differing=result.differing + differing)

    def drift_of_published(self) -> TunedDrift:
        """Measure the drift of the exported backbone from the original target."""
        context, settings = self.context, self.context.config.check
        return self.call(
            published_drift,
            "native",
            original=with_room(context.target, settings),
            published=with_room(context.backbone("export"), settings),
            text=drift_answers(_generated_rows(context), context.resolved.context),
        )


def _generated_rows(context: Context) -> Iterator[TokenRow]:
    """Return an iterator over the token rows of the generate stage."""
    generated = context.upstream["generate"]
    return read_token_rows(generated.shards(), generated.fingerprint)


def run(context: Context, stage: StageDirectory) -> Summary:
    """Check the heads with each engine, and return the joined result as the stage's summary.

    Each engine's result is kept in a file until the end, so that an interrupted check can continue.
    """
    settings = context.config.check
    export = context.upstream["export"].path
    questions = None
    if isinstance(settings.prompts, Path):
        questions = read_questions(settings.prompts)
    with context.progress(stage) as progress:
        engines = CheckEngines(context, stage, progress, questions)
        target = with_room(context.backbone("export"), settings)
        prompts = engines.prompts(target)
        most = max(read_layout(export).shape.max_depth, longest_draft(settings))
        request = CheckRequest(
            with_room_for(target, prompts.kept, settings.max_new_tokens, most),
            export,
            prompts.kept,
            settings,
            tree=read_tree(export),
            name=Path(context.config.target.model).name,
            assistant=context.resolved.assistant,
            trained=training_text(context.upstream["generate"]),
        )
        results: dict[str, CheckResult] = {}
        for engine in sorted(settings.engines):
            results[engine] = engines.stored_result(request, engine)
        result = replace(join_engines(results), prompt_sources=prompts.sources)
        if result.native is not None:
            native = replace(result.native, skipped_prompts=prompts.skipped)
            result = replace(result, native=native)
        if result.vllm is not None:
            result = replace(result, vllm=engines.vllm_figures(request, result))
        if settings.served_model:
            result = engines.with_served_model(request, result)
        result = _with_comparisons(engines, result)
    for engine in settings.engines:
        (stage.path / f"{engine}.json").unlink(missing_ok=True)
    result = replace(
        result,
        configuration=context.config.model_dump(mode="json"),
        target_revision=None if is_local(context.target.model) else context.target.revision,
        passed=not result.failures(Limits.of(context.config)),
    )
    return to_json(result)


def _with_comparisons(engines: CheckEngines, result: CheckResult) -> CheckResult:
    """Return the result with head 0's held-out accuracy, drift, and contaminated rows added.

    Drift is measured if training tuned the backbone. Contaminated rows are counted if the prompts
    are a file of questions.
    """
    context = engines.context
    trained = context.upstream["train"].summary
    prompts = context.config.check.prompts
    if trained["held_out"]:
        result = replace(result, head_0=trained["held_out"][0], frequency=trained["frequency"])
    if method_of(context.config.train).tunes_backbone:
        result = replace(result, drift=engines.drift_of_published())
    if isinstance(prompts, Path):
        shards = context.upstream["generate"].shards()
        result = replace(
            result,
            contaminated_rows=num_contaminated(shards, CheckQuestions(engines.questions or ())),
        )
    return result


def configuration(stage: StageDirectory, now: Config) -> Config:
    """Return the configuration of a finished check, with limits, `run` and `push` of `now`.

    The limits are those in `LIMITS`, and `train.backbone.max_kl`.
    """
    found = validate(stage.summary["configuration"], stage.path)
    limits = {name: getattr(now.check, name) for name in LIMITS}
    backbone = found.train.backbone.model_copy(update={"max_kl": now.train.backbone.max_kl})
    parts = {
        "run": now.run,
        "train": found.train.model_copy(update={"backbone": backbone}),
        "check": found.check.model_copy(update=limits),
        "push": now.push,
    }
    return found.model_copy(update=parts)


STAGE = Stage(NAME, VERSION, reads("seeds", "generate", "export", "train"), identity, run, FIGURES)
