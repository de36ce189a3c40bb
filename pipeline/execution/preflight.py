"""What can be refused before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.checkpoints.layout import check_num_heads
from pipeline.config import Config
from pipeline.errors import ConfigError

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
    if os.environ.get(SUBMITTED_JOB):
        _check_lasting(config)


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
