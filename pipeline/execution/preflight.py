"""What can be refused before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import ConfigError


def check_root(config: Config) -> None:
    """Refuse a run directory inside a submitted job's uploaded copy: it would vanish with the copy.

    Raises:
        ConfigError: `run.root` or `run.store` lies in the job's working directory.
    """
    if not os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR"):
        return
    uploaded = Path.cwd().resolve()
    for key, path in (("run.root", config.run.root), ("run.store", config.run.store)):
        if path is not None and path.resolve().is_relative_to(uploaded):
            raise ConfigError(
                "A submitted job runs in an uploaded copy of the directory, and results there would vanish with it.",
                f"{key} = {path}",
                "Give an absolute path on storage that every node sees, such as run.root=/mnt/runs.",
            )
