"""Results as JSON and back: frozen dataclasses whose field names are the keys."""

from __future__ import annotations

import math
from typing import Any, TypeVar

from pydantic import TypeAdapter

Result = TypeVar("Result")


def to_json(result: object) -> dict[str, Any]:
    """The fields of a dataclass as JSON; those that are None are left out."""
    return dict(TypeAdapter(type(result)).dump_python(result, mode="json", exclude_none=True))


def from_json(kind: type[Result], found: Any) -> Result:
    """Read back what `to_json` gave of a `kind`; other keys are ignored.

    Raises:
        pydantic.ValidationError: It is of another form.
    """
    return TypeAdapter(kind).validate_python(found)


def rounded(value: float, digits: int = 4) -> float | None:
    """The figure rounded, None where it is not finite."""
    return round(value, digits) if math.isfinite(value) else None
