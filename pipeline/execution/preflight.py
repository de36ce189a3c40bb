"""What can be refused before anything starts."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pipeline.checkpoints.layout import check_num_heads, check_repo_id, is_local
from pipeline.config import Config, PushConfig
from pipeline.errors import ConfigError
from pipeline.medusa.tree import Path as TreePath
from pipeline.medusa.tree import check_choices

SUBMITTED_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray sets it in a submitted job's entry point


def check_config(config: Config) -> None:
    """Refuse settings that a later stage could not carry out.

    Raises:
        ConfigError: Names the key.
    """
    check_num_heads(config.train.num_heads)
    if config.calibrate.depth is not None and config.calibrate.depth > config.train.num_heads:
        raise ConfigError(
            f"A tree of depth {config.calibrate.depth} needs as many heads, and there are {config.train.num_heads}.",
            "calibrate.depth",
            "Lower it or raise train.num_heads.",
        )
    if "shared" in config.export.formats and config.train.lm_head != "tied":
        raise ConfigError(
            "The shared format stores one lm_head, and untied heads have one each.",
            "export.formats",
            "Set train.lm_head to tied, or export.formats to [expanded].",
        )
    if config.calibrate.choices:
        read_choices(config)
    require_questions(config)
    if config.push.repo_id:
        _check_push(config.push, config.target.model)
    if os.environ.get(SUBMITTED_JOB):
        _check_lasting(config)


def read_choices(config: Config) -> tuple[TreePath, ...]:
    """The tree that `calibrate.choices` names, as one for this many heads.

    Raises:
        ConfigError: It cannot be read, or is no tree.
    """
    path, fix = config.calibrate.choices, "Give a JSON list of paths such as [[0], [0, 0], [1]]."
    assert path is not None, "a tree is to be searched"
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"The tree cannot be read: {error}.", "calibrate.choices", fix) from None
    if not isinstance(choices, list):
        raise ConfigError("The tree is not a list of paths.", str(path), fix)
    return check_choices(choices, config.train.num_heads, config.calibrate.top)


def require_questions(config: Config) -> None:
    """Raise ConfigError where `check.prompts` names a file that is not there."""
    if isinstance(config.check.prompts, Path) and not config.check.prompts.is_file():
        fix = "Name a file of questions, or how many held-out rows to ask."
        raise ConfigError(f"There is no file {config.check.prompts}.", "check.prompts", fix)


def _check_push(push: PushConfig, target: str) -> None:
    """Refuse at once what the Hub would be asked for in vain after hours of work."""
    assert push.repo_id, "nothing is to be pushed"
    check_repo_id(push.repo_id, "push.repo_id", with_owner=True)
    if push.base_model:
        check_repo_id(push.base_model, "push.base_model")
    elif is_local(target):
        fix = "Publish the target and name it there, or leave push.repo_id unset."
        raise ConfigError("Nobody else can load heads for a target that is only here.", "push.base_model", fix)


def _check_lasting(config: Config) -> None:
    """A submitted job runs in an uploaded copy of the directory, which vanishes after it."""
    uploaded = Path.cwd().resolve()
    for key, path in (("run.root", config.run.root), ("run.store", config.run.store)):
        if path is not None and path.resolve().is_relative_to(uploaded):
            raise ConfigError(
                "A submitted job runs in an uploaded copy of the directory, and results there would vanish with it.",
                f"{key} = {path}",
                "Give an absolute path on storage that every node sees, such as run.root=/mnt/runs.",
            )
