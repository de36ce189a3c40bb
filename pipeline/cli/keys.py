"""`medusa-distill keys`: every configuration key, its default and its meaning."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config import Config
from pipeline.errors import ConfigError


def keys(
    section: Annotated[str | None, typer.Argument(help="Only this section, such as train.")] = None,
) -> None:
    """Print every configuration key as a Markdown table: its values, its default, what it means."""
    print(reference(section))


def reference(section: str | None = None) -> str:
    """The table of keys, one row each.

    Raises:
        ConfigError: There is no such section.
    """
    if section is not None and section not in Config.model_fields:
        raise ConfigError(
            f"There is no section '{section}'.",
            "keys",
            f"They are {', '.join(Config.model_fields)}.",
        )
    rows = [row for name, row in _rows(Config) if section is None or name.split(".")[0] == section]
    return "\n".join(["| key | values | default | meaning |", "|---|---|---|---|", *rows])


def _rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{key}.")
            continue
        yield (
            key,
            f"| `{key}` | {_values(field.annotation)} | {_default(field)} | {field.description} |",
        )
        element = next((arg for arg in get_args(field.annotation) if isinstance(arg, type)), None)
        if element is not None and issubclass(element, BaseModel):
            yield from _rows(element, f"{key}[].")


def _values(annotation: Any) -> str:
    """An annotation in readable form."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        return _values(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(
            _values(argument) for argument in arguments if argument is not type(None)
        )
    if origin is tuple:
        return f"list of {_values(arguments[0])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    words = {
        str: "text",
        int: "integer",
        float: "number",
        bool: "true, false",
        Path: "path",
        date: "date",
    }
    return words.get(annotation, "mapping")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    return (
        "–"
        if value is None
        else f"`{value if isinstance(value, str | Path | date) else json.dumps(value)}`"
    )
