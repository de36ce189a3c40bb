"""Command-line arguments that several commands take, and errors that name them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from pipeline.errors import MedusaDistillError

RunArgument = Annotated[Path, Argument(help="A run's directory, such as runs/demo.")]
TargetSettings = Annotated[
    list[str] | None,
    Argument(help="target.KEY=VALUE as in a run, such as target.dtype=bfloat16."),
]
Gpus = Annotated[
    int | None,
    Option(min=0, help="GPUs for the target. Default: 1 if there is a GPU, else 0."),
]
ConfigArgument = Annotated[
    Path, Argument(help="A YAML file, a run's directory, or a bundled name such as qwen2.5-7b.")
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        help="section.key=value; values parse as YAML, paths are relative to the working directory."
    ),
]
OPTIONS = {
    "check.prompts": "--prompts",
    "check.max_new_tokens": "--max-new-tokens",
    "check.draft_tokens": "--draft-tokens",
    "check.engines and generate.engine": "--engine",
    "check.engines": "--engine",
    "gpus_per_worker": "--gpus",
    "push.repo_id": "--repo-id",
    "push.base_model": "--base-model",
}
"""The options of commands that read no configuration, by the setting that an error may name."""


def with_options_in_errors(command: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command's errors name its options in place of a run's settings."""

    @functools.wraps(command)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return command(*arguments, **options)
        except MedusaDistillError as error:
            for setting, option in OPTIONS.items():
                error.where = error.where and str(error.where).replace(setting, option)
                error.fix = error.fix and error.fix.replace(setting, option)
            raise

    return call
