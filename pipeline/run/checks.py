"""Check a resolved run before anything starts, in the same way for `plan` and `run`.

A check raises ConfigError or DataError for a problem on every machine, and EnvironmentFault for
something that this machine lacks. `run` stops at both; `plan` prints the second as a note.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from pipeline.conversations.sources import source_readers
from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.evaluation.prompts import with_room
from pipeline.evaluation.vllm_methods import require_methods
from pipeline.execution.machine import SUBMITTED_JOB
from pipeline.heads.shapes import FORMATS
from pipeline.run.resolved import ASSISTANT, SERVED, TARGET, ResolvedRun
from pipeline.targets.files import check_repo_id, is_local
from pipeline.targets.spec import context_length, eos_token_ids
from pipeline.training.metrics import require_trackers


def check_run(run: ResolvedRun) -> None:
    """Run all `CHECKS` before a run starts; the first one that fails raises its error."""
    for check in CHECKS:
        check(run)


def check_plan(run: ResolvedRun) -> list[str]:
    """Run all `CHECKS` for `plan`; return the message of each EnvironmentFault, without repeats.

    Raises:
        ConfigError: The first problem of the settings.
        DataError: The first problem of the data.
    """
    faults = {}  # by their message
    for check in CHECKS:
        try:
            check(run)
        except EnvironmentFault as fault:
            faults[str(fault)] = fault
    return list(faults)


def warnings(run: ResolvedRun) -> list[str]:
    """Return the warnings before a run: keys without effect, and differing end tokens."""
    found = []
    train = run.config.train
    unread = ", ".join(run.method.unread_keys(train))
    if unread:
        kinds = f"{train.heads} heads and {train.method}"
        found.append(f"These keys have no effect with {kinds}: {unread}.")
    template = run.template
    if template is None:
        return found
    stated, own = eos_token_ids(run.target), template.end_ids["assistant"]
    if not set(own) <= set(stated):
        stops = template.tokens(template.stop_ids("assistant", stated))
        found.append(
            f"The chat template ends an answer with {template.tokens(own)}, and the target's"
            f" eos_token_id is {template.tokens(stated)}: generate ends answers at {stops}, the"
            " check and servers at eos_token_id."
        )
    return found


def check_placements(run: ResolvedRun) -> None:
    """Raise EnvironmentFault if the workers of an unfinished stage can never all be placed."""
    for stage in run.open_stages:
        for section in run.sections_of(stage):
            run.placement(section)


def check_heads(run: ResolvedRun) -> None:
    """Raise ConfigError if an export format cannot store the heads."""
    for name in run.config.export.formats:
        run.kind.check_format(run.shape, FORMATS[name])


def check_tree(run: ResolvedRun) -> None:
    """Raise ConfigError if the heads cannot propose the tree or the chain of draft tokens.

    Also raise it if the tree is invalid or its file cannot be read, and what `require_methods`
    raises for the drafts that the check compares with.
    """
    settings = run.config.calibrate
    most_by_key = {"depth": run.shape.max_depth, "draft_tokens": run.max_draft_tokens}
    for key, most in most_by_key.items():
        wanted = getattr(settings, key)
        if isinstance(wanted, int) and wanted > most:
            raise ConfigError(
                f"These heads propose at most {most} tokens in a row, not {wanted}.",
                f"calibrate.{key}",
                "Lower this setting or raise train.num_heads.",
            )
    if run.dynamic_tree and run.shape.row_layers:
        raise ConfigError(
            "Dynamic trees are measured with one state per position, and"
            f" {run.config.train.heads} heads attend to the whole text.",
            "calibrate.tree",
            "Set it to static.",
        )
    _ = run.choices  # which raises
    require_methods(run.config.check, run.max_draft_tokens)


def check_quantization(run: ResolvedRun) -> None:
    """Raise ConfigError if the run uses vLLM with a target that bitsandbytes quantizes."""
    keys = _keys_of_vllm(run)
    if run.config.target.quantization and keys:
        raise ConfigError(
            "vLLM cannot load a target that bitsandbytes quantizes.",
            f"target.quantization, {', '.join(keys)}",
            "Set these keys to transformers or native, or target.model to a quantized checkpoint.",
        )


def _keys_of_vllm(run: ResolvedRun) -> list[str]:
    """Return the configuration keys that make the run use vLLM."""
    config, keys = run.config, []
    if config.generate.engine == "vllm" and config.generate.mode != "passthrough":
        keys.append("generate.engine")
    if config.features.engine == "vllm":
        keys.append("features.engine")
    if "vllm" in config.check.engines:
        keys.append("check.engines")
    return keys


def check_labels(run: ResolvedRun) -> None:
    """Raise ConfigError if answers are too short for the last head to have a label.

    Head k (0-based) reads the state before an answer's token and predicts the (k+1)-th token after
    it. So an answer of n tokens has labels for n - 1 heads. In passthrough mode nothing is checked,
    since answers are the seeds' own.
    """
    num_heads, longest = run.config.train.num_heads, run.config.generate.max_new_tokens
    is_written = run.config.generate.mode != "passthrough"
    if is_written and num_heads >= longest and "train" in run.stages:
        raise ConfigError(
            f"Answers of {longest} tokens can train only {longest - 1} heads.",
            "train.num_heads",
            "Train fewer heads or raise generate.max_new_tokens.",
        )


def check_sources(run: ResolvedRun) -> None:
    """Check that the path of each seed source exists and has seed files.

    Raises what `SourceReader.files` raises. Data sets on the Hub are not checked.
    """
    for reader in source_readers(run.config.seeds):
        reader.files()


def check_models(run: ResolvedRun) -> None:
    """Raise the error of the first model that is missing or cannot be reached.

    The models are the target, its served copy and the assistant.
    """
    for problem in run.problems.values():
        raise problem


def check_template(run: ResolvedRun) -> None:
    """Raise ConfigError if the target has no usable chat template, or lacks embeddings for it."""
    _ = run.template


def check_target(run: ResolvedRun) -> None:
    """Raise ConfigError if the target's vocabulary or context is too small for the settings.

    Also raise it if vLLM cannot serve the heads in the check, or return the layers that they read.
    """
    if TARGET not in run.models:
        return  # seeds alone need no target
    config = run.config
    vocab_size = run.model(TARGET).config.get_text_config().vocab_size
    draft_vocab = config.train.draft_vocab
    if draft_vocab and draft_vocab > vocab_size:
        raise ConfigError(
            f"A draft vocabulary of {draft_vocab} tokens exceeds the target's of {vocab_size}.",
            "train.draft_vocab",
            "Lower this setting or leave it unset.",
        )
    shape = run.shape.drafting(draft_vocab)
    refusal = run.kind.vllm_refusal(shape, run.target_config.to_dict())
    if refusal and "vllm" in config.check.engines:
        raise ConfigError(refusal, "check.engines", "Set check.engines to [native].")
    if refusal and run.shape.row_layers and config.features.engine == "vllm":
        raise ConfigError(refusal, "features.engine", "Set features.engine to transformers.")
    context = context_length(with_room(run.target, config.check), run.target_config)
    longest = config.check.max_new_tokens
    if "check" in run.stages and longest >= context:
        raise ConfigError(
            f"{longest} tokens after a prompt do not fit in the target's context of {context}.",
            "check.max_new_tokens",
            "Lower this setting.",
        )


def check_served_copy(run: ResolvedRun) -> None:
    """Raise ConfigError if the served copy or the assistant does not fit the target.

    The vocabulary must be the target's, and of the copy also the hidden size.
    """
    if TARGET not in run.models:
        return
    target = run.target_config.get_text_config()
    for key in (SERVED, ASSISTANT):
        if key not in run.models:
            continue
        found = run.model(key).config.get_text_config()
        is_other = key == SERVED and found.hidden_size != target.hidden_size
        if is_other or found.vocab_size != target.vocab_size:
            raise ConfigError(
                "This model differs from the target in vocabulary or hidden size.",
                key,
                "A served model is a copy of the target, such as a quantized one; an assistant is a"
                " smaller model with the target's vocabulary.",
            )


def check_method(run: ResolvedRun) -> None:
    """Raise ConfigError if the training method cannot train with these settings or this target."""
    if "train" in run.stages and TARGET in run.models:
        run.method.check(run.config, run.target)


def check_prompts_file(run: ResolvedRun) -> None:
    """Raise ConfigError if the file of the check's prompts does not exist."""
    path = run.config.check.prompts
    if isinstance(path, Path) and not path.is_file():
        raise ConfigError(
            f"There is no file {path}.",
            "check.prompts",
            "Set check.prompts to an existing file, or remove the key.",
        )


def check_acceptance(run: ResolvedRun) -> None:
    """Raise ConfigError if a parameter of the check does not fit its acceptance rule."""
    check, key = run.config.check, None
    rule = check.acceptance
    if rule != "greedy" and check.temperature == 0:
        key = "check.temperature"
    elif rule != "rejection" and check.top_p < 1:
        key = "check.top_p"
    if key:
        raise ConfigError(
            f"The value of {key} cannot be used with {rule} acceptance.",
            key,
            "typical and rejection need a temperature above 0; top_p needs rejection.",
        )


def check_push(run: ResolvedRun) -> None:
    """Raise ConfigError if a repository id is invalid, or `push.base_model` is missing.

    Heads for a local target need `push.base_model`, unless training tunes the backbone.
    """
    push = run.config.push
    for repo_id in run.repositories:
        check_repo_id(repo_id, "push.repo_id", with_owner=True)
    if push.base_model:
        check_repo_id(push.base_model, "push.base_model")
    elif push.repo_id and is_local(run.config.target.model) and not run.method.tunes_backbone:
        raise ConfigError(
            "The target is a local directory, so nobody else could load these heads.",
            "push.base_model",
            "Publish the target and set push.base_model to its id, or leave push.repo_id unset.",
        )


def check_root(run: ResolvedRun) -> None:
    """Raise ConfigError if a submitted Ray job would write into its uploaded copy of the directory.

    Ray deletes that copy, so `run.root` and `run.store` must be elsewhere.
    """
    if not os.environ.get(SUBMITTED_JOB):
        return
    for key in ("root", "store"):
        path = getattr(run.config.run, key)
        if path and path.resolve().is_relative_to(Path.cwd().resolve()):
            raise ConfigError(
                "A submitted job would write into its uploaded directory, which Ray deletes.",
                f"run.{key} = {path}",
                "Give an absolute path on storage that every node sees, such as /mnt/runs.",
            )


def check_packages(run: ResolvedRun) -> None:
    """Raise EnvironmentFault if an unfinished stage needs vLLM and vLLM is not installed.

    With RAY_ADDRESS set nothing is checked, since workers have packages of their own.
    """
    if os.environ.get("RAY_ADDRESS") or importlib.util.find_spec("vllm"):
        return
    for key in _keys_of_vllm(run):
        stage = key.partition(".")[0]
        if not {stage, f"row-{stage}", f"tuned-{stage}"}.isdisjoint(run.open_stages):
            raise EnvironmentFault(
                f"vllm is not installed here, and {stage} needs it.",
                key,
                "Install the lock file for this accelerator (`make install`), or change this key.",
            )


def check_trackers(run: ResolvedRun) -> None:
    """Raise EnvironmentFault if a tracker of training is not installed or has no login here.

    With RAY_ADDRESS set, or if nothing is to be trained, nothing is checked.
    """
    if "train" in run.open_stages and not os.environ.get("RAY_ADDRESS"):
        require_trackers(run.config.train.report_to)


CHECKS = (
    check_prompts_file,
    check_heads,
    check_tree,
    check_quantization,
    check_labels,
    check_sources,
    check_models,
    check_template,
    check_target,
    check_served_copy,
    check_method,
    check_acceptance,
    check_push,
    check_root,
    check_packages,
    check_trackers,
)
