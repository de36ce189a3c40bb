"""`medusa-distill keys`: print all configuration keys with default and meaning."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from pipeline.config.reference import reference


def keys(
    section: Annotated[str | None, Argument(help="Only this section, such as train.")] = None,
) -> None:
    """Print all configuration keys as a Markdown table: values, default and meaning."""
    print(reference(section))
