"""Command-line arguments that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

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
    Path, Argument(help="A YAML file, a run's run.yaml, or a bundled name such as qwen2.5-7b.")
]
Overrides = Annotated[
    list[str] | None,
    Argument(
        help="section.key=value; values parse as YAML, paths are relative to the working directory."
    ),
]
