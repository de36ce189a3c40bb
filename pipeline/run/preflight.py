"""Validation of settings before anything starts."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from pipeline.artifacts.quantized_states import stored_dtype
from pipeline.config import CheckConfig, Config, PushConfig, TargetConfig
from pipeline.conversations.sources import source_readers
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.execution.machine import SUBMITTED_JOB, unusable_driver
from pipeline.export.hub import repositories
from pipeline.export.layout import check_formats, check_num_heads
from pipeline.heads.kinds import head_kind
from pipeline.run.lengths import require_labels, require_room
from pipeline.run.placements import may_be_kept
from pipeline.run.readable_targets import check_quantization, check_readers
from pipeline.run.tree_settings import check_tree
from pipeline.targets.files import check_repo_id, is_local
from pipeline.targets.spec import TargetSpec, model_config, resolve
from pipeline.training.methods import method_of
from pipeline.training.trackers import require_trackers


def check_config(
    config: Config,
    stages: Collection[str] | None = None,
    *,
    notes: list[str] | None = None,
    fresh: str | None = None,
) -> None:
    """Check settings that a later stage would fail on.

    Args:
        stages: Those to run, None for all.
        notes: Where it is given, what only this machine lacks (a package, a driver, the Hub) is
            noted there and not refused: a plan may be of a run elsewhere.
        fresh: The one of them whose finished result is not kept.

    Raises:
        ConfigError: With the key.
        DataError: A source of seeds is not there.
        EnvironmentFault: A package that a stage needs is not installed, or torch cannot use the GPU
            that is here.
    """
    kind, method = head_kind(config.train.heads), method_of(config.train)
    check_num_heads(config.train.num_heads)
    shape = kind.shape_of(config.train, 1, 1)  # whatever the target's sizes
    check_tree(config)
    check_formats(kind, shape, config.export.formats)
    check_quantization(config)
    require_labels(config, stages)
    _check_sources(config)
    if set(stages or ("all",)) != {"seeds"}:  # which need no target yet
        with _noted(notes):
            _check_target(config)
            require_room(config, stages)
        with _noted(notes):
            _check_driver(config)
        with _noted(notes):
            check_readers(config)
    if stages is None or "train" in stages:
        with _noted(notes):
            method.check(config)
    if config.features.precision != "native":
        stored_dtype(config.features.precision)
    require_files(config)
    _check_rule(config.check)
    if config.check.assistant_model:
        with _noted(notes):
            resolve_assistant(config.check.assistant_model)
    _check_push(config.push, config.target.model, config.train.heads, tuned=method.tunes_backbone)
    if os.environ.get(SUBMITTED_JOB):
        _check_lasting(config)
    if not os.environ.get("RAY_ADDRESS"):  # on a cluster the workers' packages decide
        with _noted(notes):
            _check_packages(config, stages, fresh)
        if stages is None or "train" in stages:
            with _noted(notes):
                _check_trackers(config, fresh)


@contextlib.contextmanager
def _noted(notes: list[str] | None) -> Iterator[None]:
    """Note what the environment does not allow, where there are notes."""
    try:
        yield
    except EnvironmentFault as error:
        if notes is None:
            raise
        if str(error) not in notes:
            notes.append(str(error))


def unread_settings(config: Config) -> list[str]:
    """A warning for keys that only another kind of heads or another method reads."""
    unread = method_of(config.train).unread(config.train)
    chosen = f"train.heads: {config.train.heads} and train.method: {config.train.method}"
    return [f"Not read with {chosen}: {', '.join(unread)}."] if unread else []


def not_served(config: Config) -> str | None:
    """Why vLLM cannot serve these heads with this target; None where it can."""
    kind = head_kind(config.train.heads)
    if not kind.vllm_method:
        return kind.not_served(kind.shape_of(config.train, 1, 1), {})
    target = model_config(resolve(config.target))
    text = target.get_text_config()
    shape = kind.shape_of(config.train, text.hidden_size, text.vocab_size).drafting(
        config.train.draft_vocab
    )
    return kind.not_served(shape, target.to_dict())


def require_files(config: Config) -> None:
    """Raise ConfigError where `check.prompts` or `calibrate.data` names a file that does not
    exist.
    """
    for key, path, fix in (
        (
            "check.prompts",
            config.check.prompts,
            "Name a file of questions, or how many held-out rows to ask.",
        ),
        (
            "calibrate.data",
            config.calibrate.data,
            "Name a file of conversations, or leave it unset for held-out rows.",
        ),
    ):
        if isinstance(path, Path) and not path.is_file():
            raise ConfigError(f"There is no file {path}.", key, fix)


def resolve_assistant(model: str) -> TargetSpec:
    """The assistant model of the check's baselines; raises ConfigError where it does not exist."""
    try:
        return resolve(TargetConfig(model=model))
    except ConfigError as error:
        raise ConfigError(error.what, "check.assistant_model", error.fix) from None


def _check_sources(config: Config) -> None:
    """Raise ConfigError or DataError where a file of seeds is not there."""
    for reader in source_readers(config.seeds):
        reader.survey()


def _check_driver(config: Config) -> None:
    """Raise EnvironmentFault where a GPU is here that torch cannot use, unless every stage is to do
    without.
    """
    without = all(wanted.gpus_per_worker == 0 for wanted in config.placement.of_stages().values())
    if not without and (reason := unusable_driver()):
        fix = (
            "Update the driver or install torch for an older CUDA; to compute on the CPU all the"
            " same, set placement.generate.gpus_per_worker, placement.features.gpus_per_worker and"
            " placement.train.gpus_per_worker to 0."
        )
        raise EnvironmentFault(f"{reason}.", "nvidia driver", fix)


def _check_target(config: Config) -> None:
    """Raise ConfigError for a local target that is not there, and where vLLM cannot serve these
    heads with it.
    """
    if is_local(config.target.model):
        resolve(config.target)
    _check_vocabulary(config)
    if "vllm" in config.check.engines and (reason := not_served(config)):
        raise ConfigError(reason, "check.engines", "Set check.engines to [native].")


def _check_vocabulary(config: Config) -> None:
    """Raise ConfigError for a draft vocabulary above the target's, or for more guesses than heads
    can make.
    """
    drafted, top = config.train.draft_vocab, config.calibrate.top
    if (
        not drafted and config.calibrate.tree != "dynamic"
    ):  # a static tree makes as many guesses as there are
        return
    target_size = model_config(resolve(config.target)).get_text_config().vocab_size
    if drafted and drafted > target_size:
        what = (
            f"A draft vocabulary of {drafted} tokens is asked for, and the target's has"
            f" {target_size}."
        )
        raise ConfigError(
            what,
            "train.draft_vocab",
            f"Lower it, such as to {target_size // 4}, or leave it unset.",
        )
    if top > (most := drafted or target_size):
        what = f"{top} guesses of each head are asked for, and it can propose only {most} tokens."
        raise ConfigError(what, "calibrate.top", f"Lower it to at most {most}.")


def _check_rule(check: CheckConfig) -> None:
    """Raise ConfigError for parameters that the acceptance rule rejects or does not use."""
    rule, wrong = check.acceptance, None
    if rule != "greedy" and check.temperature == 0:
        wrong = (
            "temperature",
            f"At temperature 0 {rule} acceptance is greedy acceptance",
            "Raise it, or say greedy.",
        )
    elif rule in ("greedy", "typical") and check.top_p < 1:
        wrong = (
            "top_p",
            f"It is of no effect with {rule} acceptance",
            "Leave it at 1, or take rejection.",
        )
    elif rule != "typical" and check.first_token == "sampled":
        wrong = (
            "first_token",
            f"It is of no effect with {rule} acceptance",
            "Leave it, or take typical.",
        )
    if wrong:
        key, what, fix = wrong
        raise ConfigError(f"{what}.", f"check.{key}", fix)


def _check_push(push: PushConfig, target: str, heads: str, *, tuned: bool) -> None:
    """Check push settings that would fail on the Hub only after hours of work."""
    if not push.asks_for_something:
        return
    for repo_id in repositories(push, head_kind(heads), target, tuned=tuned):
        check_repo_id(repo_id, "push.repo_id, push.dataset", with_owner=True)
    if push.base_model:
        check_repo_id(push.base_model, "push.base_model")
    elif push.repo_id and os.path.isabs(target) and not tuned:
        fix = "Publish the target and name it there, or leave push.repo_id unset."
        raise ConfigError(
            "Nobody else can load heads for a target that is only here.", "push.base_model", fix
        )


def _check_packages(config: Config, stages: Collection[str] | None, fresh: str | None) -> None:
    """Check that the packages that the settings need are installed, without importing them.

    Stages with a finished result in the store are not checked, since they may have run on another
    machine.
    """
    for stage, package, key, fix in _needed_packages(config):
        installed = sys.modules.get(package) or importlib.util.find_spec(package)
        if (
            (stages is None or stage in stages)
            and not installed
            and not may_be_kept(config, stage, fresh)
        ):
            name = {"vllm": "vLLM"}.get(package, package)
            raise EnvironmentFault(f"{name} is not installed here, and {stage} needs it.", key, fix)


def _check_trackers(config: Config, fresh: str | None) -> None:
    """Check that trackers are there and take points, unless a finished training may be kept."""
    if not may_be_kept(config, "train", fresh):
        require_trackers(config.train.report_to)


def _needed_packages(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """(stage, package, the key that needs it, and the advice without it)."""
    install = "Install it with the right lock (`make install`), or set"
    if config.generate.engine == "vllm" and config.generate.mode != "passthrough":
        yield "generate", "vllm", "generate.engine", f"{install} generate.engine to transformers."
    if config.features.engine == "vllm":
        yield "features", "vllm", "features.engine", f"{install} features.engine to transformers."
    if "vllm" in config.check.engines:
        yield "check", "vllm", "check.engines", f"{install} check.engines to [native]."
    if config.train.optimizer == "adamw-8bit":
        yield "train", "bitsandbytes", "train.optimizer", f"{install} train.optimizer to adamw."
    method = method_of(config.train)
    for package in method.packages(config):
        yield "train", *package
    if config.target.quantization:
        loads_it = "tuned-features" if method.tunes_backbone else "features"
        yield (
            loads_it,
            "bitsandbytes",
            "target.quantization",
            "Install it, or leave target.quantization unset.",
        )


def _check_lasting(config: Config) -> None:
    """Raise ConfigError for results inside the uploaded directory of a submitted job, which is
    deleted after it.
    """
    uploaded = Path.cwd().resolve()
    for key, path in (("run.root", config.run.root), ("run.store", config.run.store)):
        if path is not None and path.resolve().is_relative_to(uploaded):
            raise ConfigError(
                "A submitted job runs in an uploaded copy of the directory, and results there would"
                " vanish with it.",
                f"{key} = {path}",
                "Give an absolute path on storage that every node sees, such as"
                " run.root=/mnt/runs.",
            )
