"""Stage results as JSON: frozen dataclasses whose field names are the keys."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from pydantic import TypeAdapter

from pipeline.storage.atomic import JsonObject

Result = TypeVar("Result")
adapter: Any = functools.cache(TypeAdapter)  # making one takes milliseconds


@dataclass_transform(kw_only_default=True, frozen_default=True)
def result(kind: type[Result]) -> type[Result]:
    """Class decorator: make a class a frozen dataclass with keyword-only fields."""
    return dataclass(frozen=True, kw_only=True)(kind)


def to_json(result: object) -> JsonObject:
    """Convert a dataclass to JSON data, without fields that are None."""
    return adapter(type(result)).dump_python(result, mode="json", exclude_none=True)


def from_json(kind: type[Result], found: Any) -> Result:
    """Build a value of the type `kind` from JSON data; unknown keys are ignored.

    Raises:
        pydantic.ValidationError: The JSON does not have the form of `kind`.
    """
    return adapter(kind).validate_python(found)


def rounded(value: float, digits: int = 4) -> float | None:
    """Return a number rounded to `digits` decimals, or None if it is not finite."""
    return round(value, digits) if math.isfinite(value) else None
