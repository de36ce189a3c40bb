"""What every section of the configuration has in common."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, model_validator

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Precision = Literal["native", "fp8", "int8"]  # of stored states
DTYPES = tuple(name for name in get_args(Dtype) if name != "auto")


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def nothing_is_the_defaults(cls, value: Any) -> Any:
        """A section whose every line is commented out."""
        return {} if value is None else value
