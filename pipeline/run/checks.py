"""The checks of a resolved run before anything starts, the same for `plan` and `run`.

A check raises ConfigError or DataError for what no machine can do, and EnvironmentFault for what
this machine lacks: `run` refuses both, `plan` shows the second as a note.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pipeline.conversations.sources import source_readers
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.evaluation.prompts import with_room
from pipeline.execution.machine import SUBMITTED_JOB, unusable_driver
from pipeline.export.hub import repositories
from pipeline.export.layout import check_formats, check_num_heads
from pipeline.run.resolved import ASSISTANT, ENGINE_SECTIONS, SERVED, TARGET, ResolvedRun
from pipeline.targets.files import check_repo_id, is_local
from pipeline.targets.loading import require_readable
from pipeline.targets.spec import context_length
from pipeline.training.methods import Package
from pipeline.training.metrics import require_trackers


def check_run(run: ResolvedRun) -> None:
    """Raise the first problem that a check finds."""
    for check in CHECKS:
        check(run)


def check_plan(run: ResolvedRun) -> list[str]:
    """Raise the first problem that no machine solves; return those of this machine."""
    notes: list[str] = []
    for check in CHECKS:
        try:
            check(run)
        except EnvironmentFault as fault:
            if str(fault) not in notes:
                notes.append(str(fault))
    return notes


def unread_settings(run: ResolvedRun) -> list[str]:
    """A warning for keys that only another kind of heads or another method reads."""
    train = run.config.train
    unread = run.method.unread(train)
    if not unread:
        return []
    chosen = f"train.heads: {train.heads} and train.method: {train.method}"
    return [f"Not read with {chosen}: {', '.join(unread)}."]


def not_served(run: ResolvedRun) -> str | None:
    """Explain why vLLM cannot serve these heads with this target; None if it can."""
    if not run.kind.vllm_method:
        return run.kind.not_served(run.shape, {})
    target = run.target_config.to_dict()
    return run.kind.not_served(run.shape.drafting(run.config.train.draft_vocab), target)


def check_placements(run: ResolvedRun) -> None:
    """Raise EnvironmentFault for workers of open stages that can never be placed."""
    for stage in run.open_stages:
        for section in sorted(run.sections_of(stage)):
            run.placement(section)


def check_heads(run: ResolvedRun) -> None:
    check_num_heads(run.config.train.num_heads)
    check_formats(run.kind, run.shape, run.config.export.formats)


def check_tree(run: ResolvedRun) -> None:
    """Refuse a tree or a chain that the heads cannot propose."""
    train, settings, most = run.config.train, run.config.calibrate, run.shape.max_depth
    if settings.depth is not None and settings.depth > most:
        raise ConfigError(
            f"{train.num_heads} {train.heads} heads propose at most {most} tokens ahead, and a"
            f" tree of depth {settings.depth} is asked for.",
            "calibrate.depth",
            "Lower it or raise train.num_heads.",
        )
    _ = run.dynamic_tree, run.choices  # which raise
    wanted, longest = settings.draft_tokens, run.max_draft_tokens
    if wanted != "auto" and wanted > longest:
        fix = f"Lower it to at most {longest}, or raise train.num_heads."
        raise ConfigError(
            f"These heads cannot draft {wanted} tokens.", "calibrate.draft_tokens", fix
        )


def check_quantization(run: ResolvedRun) -> None:
    """Refuse vLLM for a target that bitsandbytes quantizes on loading."""
    config = run.config
    bits = config.target.quantization
    if not bits:
        return
    instead = []
    generates = config.generate.mode != "passthrough" or config.calibrate.data
    for name, settings in (("generate", config.generate), ("features", config.features)):
        by_vllm = settings.engine == "vllm" and "quantization" not in settings.engine_args
        if by_vllm and (name != "generate" or generates):
            instead.append(f"{name}.engine=transformers")
    if "vllm" in config.check.engines:
        instead.append("check.engines=[native]")
    if instead:
        raise ConfigError(
            f"vLLM cannot load a target in {bits}, which is bitsandbytes'.",
            f"target.quantization = {bits}",
            f"Set {' '.join(instead)}; or name a checkpoint that is quantized already (AWQ, GPTQ,"
            " FP8) as the target.",
        )


def check_labels(run: ResolvedRun) -> None:
    """Refuse answers so short that the last head has no label.

    Head k reads the state before an answer's token and guesses the (k+1)-th after that token: an
    answer of n tokens has labels for n - 1 heads. Passed-through answers are as long as the seeds'.
    """
    num_heads, longest = run.config.train.num_heads, run.config.generate.max_new_tokens
    if run.config.generate.mode == "passthrough" or num_heads < longest:
        return
    if "train" in run.stages:
        fewer = f"Train at most {longest - 1} heads, or raise" if longest > 1 else "Raise"
        raise ConfigError(
            f"Answers of at most {longest} tokens have nothing that head {num_heads - 1} could"
            " learn to guess.",
            "train.num_heads",
            f"{fewer} generate.max_new_tokens.",
        )


def check_sources(run: ResolvedRun) -> None:
    for reader in source_readers(run.config.seeds):
        reader.survey()


def check_target(run: ResolvedRun) -> None:
    """Refuse a target that cannot be had or whose vocabulary or context is too small."""
    if TARGET not in run.models and TARGET not in run.problems:
        return  # seeds alone need no target
    config = run.config
    vocab_size = run.model(TARGET).config.get_text_config().vocab_size
    drafted, top = config.train.draft_vocab, config.calibrate.top
    if drafted and drafted > vocab_size:
        raise ConfigError(
            f"A draft vocabulary of {drafted} tokens is asked for, and the target's has"
            f" {vocab_size}.",
            "train.draft_vocab",
            f"Lower it, such as to {vocab_size // 4}, or leave it unset.",
        )
    most = drafted or vocab_size
    # A static tree uses as many guesses as there are.
    if top > most and (drafted or config.calibrate.tree == "dynamic"):
        what = f"{top} guesses of each head are asked for, and it can propose only {most} tokens."
        raise ConfigError(what, "calibrate.top", f"Lower it to at most {most}.")
    if "vllm" in config.check.engines:
        reason = not_served(run)
        if reason:
            raise ConfigError(reason, "check.engines", "Set check.engines to [native].")
    context = context_length(with_room(run.target, config.check), run.target_config)
    if "check" in run.stages and config.check.max_new_tokens >= context:
        raise ConfigError(
            f"{config.check.max_new_tokens} tokens after a prompt do not fit in the target's"
            f" context of {context}.",
            "check.max_new_tokens",
            f"Lower it: a prompt needs some of the {context}, too.",
        )


def check_served_copy(run: ResolvedRun) -> None:
    """Refuse a copy of another vocabulary or hidden size than the target's."""
    if SERVED not in run.models and SERVED not in run.problems:
        return
    copy, target = run.model(SERVED).config.get_text_config(), run.target_config.get_text_config()
    for name, words in (("vocab_size", "vocabulary"), ("hidden_size", "hidden size")):
        of_copy, of_target = getattr(copy, name), getattr(target, name)
        if of_copy != of_target:
            raise ConfigError(
                f"{run.model(SERVED).spec.model} has a {words} of {of_copy}, and the target one of"
                f" {of_target}: the heads do not fit it.",
                SERVED,
                "Name a copy of the target, such as a quantized one.",
            )


def check_assistant(run: ResolvedRun) -> None:
    if ASSISTANT in run.problems:
        raise run.problems[ASSISTANT]


def check_readers(run: ResolvedRun) -> None:
    """Refuse a quantized target or copy that an engine cannot read here.

    On a cluster the workers decide.
    """
    config = run.config
    if os.environ.get("RAY_ADDRESS") or TARGET not in run.models:
        return
    engines: set[tuple[str, str]] = {
        (config.generate.engine, "generate"),
        (config.features.engine, "features"),
    }
    for name in config.check.engines:
        engines.add((name, ENGINE_SECTIONS[name]))
    for engine, section in sorted(engines):
        require_readable(run.target, engine, on_gpu=run.gpus_of(section) > 0, where=TARGET)
    for engine, copy in run.served_copies.items():
        on_gpu = run.gpus_of(ENGINE_SECTIONS[engine]) > 0
        require_readable(copy, engine, on_gpu=on_gpu, where=SERVED)


def check_driver(run: ResolvedRun) -> None:
    """Refuse a GPU that torch cannot use, unless every stage is to do without GPUs."""
    sections = run.config.placement.of_stages()
    if set(run.stages) == {"seeds"} or all(
        wanted.gpus_per_worker == 0 for wanted in sections.values()
    ):
        return
    reason = unusable_driver()
    if reason:
        keys = [f"placement.{name}.gpus_per_worker" for name in sections]
        fix = (
            "Update the driver or install torch for an older CUDA; to compute on the CPU all the"
            f" same, set {', '.join(keys)} to 0."
        )
        raise EnvironmentFault(f"{reason}.", "nvidia driver", fix)


def check_method(run: ResolvedRun) -> None:
    if "train" in run.stages and TARGET in run.models:
        run.method.check(run.config, run.target)


def check_files(run: ResolvedRun) -> None:
    """Refuse `check.prompts` or `calibrate.data` that names no file."""
    prompts, data = run.config.check.prompts, run.config.calibrate.data
    if isinstance(prompts, Path) and not prompts.is_file():
        fix = "Name a file of questions, or how many held-out rows to ask."
        raise ConfigError(f"There is no file {prompts}.", "check.prompts", fix)
    if data is not None and not data.is_file():
        fix = "Name a file of conversations, or leave it unset for held-out rows."
        raise ConfigError(f"There is no file {data}.", "calibrate.data", fix)


def check_acceptance(run: ResolvedRun) -> None:
    """Refuse parameters that the acceptance rule does not use."""
    check = run.config.check
    rule = check.acceptance
    if rule != "greedy" and check.temperature == 0:
        raise ConfigError(
            f"At temperature 0 {rule} acceptance is greedy acceptance.",
            "check.temperature",
            "Raise it, or set check.acceptance to greedy.",
        )
    what = f"It is of no effect with {rule} acceptance."
    if rule != "rejection" and check.top_p < 1:
        fix = "Leave it at 1, or set check.acceptance to rejection."
        raise ConfigError(what, "check.top_p", fix)
    if rule != "typical" and check.first_token == "sampled":
        fix = "Leave it unset, or set check.acceptance to typical."
        raise ConfigError(what, "check.first_token", fix)


def check_push(run: ResolvedRun) -> None:
    """Refuse settings that the Hub would refuse after hours of work."""
    push, target = run.config.push, run.config.target.model
    if not push.asks_for_something:
        return
    tuned = run.method.tunes_backbone
    for repo_id in repositories(push, run.kind, target, tuned=tuned):
        check_repo_id(repo_id, "push.repo_id, push.dataset", with_owner=True)
    if push.base_model:
        check_repo_id(push.base_model, "push.base_model")
    elif push.repo_id and is_local(target) and not tuned:
        fix = "Publish the target and name it there, or leave push.repo_id unset."
        raise ConfigError(
            "Nobody else can load heads for a target that is only here.", "push.base_model", fix
        )


def check_root(run: ResolvedRun) -> None:
    """Refuse results inside the uploaded directory of a submitted job: it is deleted later."""
    if not os.environ.get(SUBMITTED_JOB):
        return
    uploaded = Path.cwd().resolve()
    for key, path in (("run.root", run.config.run.root), ("run.store", run.config.run.store)):
        if path is not None and path.resolve().is_relative_to(uploaded):
            raise ConfigError(
                "A submitted job runs in an uploaded copy of the directory, and results there would"
                " vanish with it.",
                f"{key} = {path}",
                "Give an absolute path on storage that every node sees, such as"
                " run.root=/mnt/runs.",
            )


def check_packages(run: ResolvedRun) -> None:
    """Refuse packages that open stages need and this machine lacks; none is imported.

    On a cluster the workers' packages decide.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    for stage, package in _packages(run):
        installed = sys.modules.get(package.name) or importlib.util.find_spec(package.name)
        if stage in run.open_stages and not installed:
            raise EnvironmentFault(
                f"{package.name} is not installed here, and {stage} needs it.",
                package.key,
                package.fix,
            )


def _packages(run: ResolvedRun) -> Iterator[tuple[str, Package]]:
    """Yield (stage, package) for every package that the run needs."""
    config, install = run.config, "Install it with the right lock (`make install`), or set"
    if config.generate.engine == "vllm" and config.generate.mode != "passthrough":
        fix = f"{install} generate.engine to transformers."
        yield "generate", Package("vllm", "generate.engine", fix)
    if config.features.engine == "vllm":
        fix = f"{install} features.engine to transformers."
        yield "features", Package("vllm", "features.engine", fix)
    if "vllm" in config.check.engines:
        fix = f"{install} check.engines to [native]."
        yield "check", Package("vllm", "check.engines", fix)
    if config.train.optimizer == "adamw-8bit":
        fix = f"{install} train.optimizer to adamw."
        yield "train", Package("bitsandbytes", "train.optimizer", fix)
    for package in run.method.packages(config):
        yield "train", package
    if config.target.quantization:
        stage = "tuned-features" if run.method.tunes_backbone else "features"
        fix = "Install it, or leave target.quantization unset."
        yield stage, Package("bitsandbytes", "target.quantization", fix)


def check_trackers(run: ResolvedRun) -> None:
    if "train" in run.open_stages and not os.environ.get("RAY_ADDRESS"):
        require_trackers(run.config.train.report_to)


CHECKS = (
    check_heads,
    check_tree,
    check_quantization,
    check_labels,
    check_sources,
    check_target,
    check_served_copy,
    check_assistant,
    check_driver,
    check_readers,
    check_method,
    check_files,
    check_acceptance,
    check_push,
    check_root,
    check_packages,
    check_trackers,
)
