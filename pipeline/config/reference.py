"""Generate the reference of configuration keys, a Markdown table."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline.config import Config
from pipeline.errors import ConfigError

TYPE_NAMES = {
    str: "text",
    int: "integer",
    float: "number",
    bool: "true, false",
    Path: "path",
    date: "date",
}


def reference(section: str | None = None) -> str:
    """Return a Markdown table of all configuration keys, or of the keys in one section.

    Raises:
        ConfigError: There is no such section.
    """
    if section is not None and section not in Config.model_fields:
        raise ConfigError(
            f"There is no section '{section}'.",
            "keys",
            f"They are {', '.join(Config.model_fields)}.",
        )
    lines = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key, row in key_rows(Config):
        if section in (None, key.split(".")[0]):
            lines.append(row)
    return "\n".join(lines)


def key_rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each dotted configuration key of a settings class with its row of the Markdown table.

    Keys of nested sections are included, and keys of list entries as `seeds.sources[].path`.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from key_rows(field.annotation, f"{key}.")
            continue
        cells = [f"`{key}`", _values(field.annotation), _default(field), field.description or ""]
        yield key, f"| {' | '.join(cells)} |"
        for element in get_args(field.annotation):
            if isinstance(element, type) and issubclass(element, BaseModel):
                yield from key_rows(element, f"{key}[].")


def _values(annotation: Any) -> str:
    """Describe the values that a configuration key's type allows, without None, for the table."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        return _values(arguments[0])
    if origin is tuple:
        return f"list of {_values(arguments[0])}"
    if origin in (Union, types.UnionType):
        return " or ".join(_values(each) for each in arguments if each is not type(None))
    return TYPE_NAMES.get(annotation, "mapping")


def _default(field: FieldInfo) -> str:
    """Format a configuration key's default value as a cell of the Markdown table.

    The cell is `needed` for a required key, and a dash for None.
    """
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is None:
        return "–"
    if not isinstance(value, str | Path | date):
        value = json.dumps(value)
    return f"`{value}`"
