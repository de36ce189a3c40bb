"""`medusa-distill keys`: print every configuration key, its default and its meaning."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from pipeline.config.reference import reference


def keys(
    section: Annotated[str | None, Argument(help="Only this section, such as train.")] = None,
) -> None:
    """Print every configuration key as a Markdown table: its values, its default, what it means."""
    print(reference(section))
