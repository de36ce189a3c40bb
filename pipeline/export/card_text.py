"""Cards as Markdown: the templates beside this file, and how values are written in them.

A value that is missing at any depth renders as nothing.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, ChoiceLoader, DictLoader, Environment, FileSystemLoader

from pipeline.heads.kind import Heads


def rendered(template: str, kind: type[Heads], facts: Mapping[str, Any]) -> str:
    """The card of this template; what the kind says of itself and of its engines can be included in it."""
    text = _environment(kind).get_template(template).render(facts, kind=kind)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


@functools.cache
def _environment(kind: type[Heads]) -> Environment:
    of_kind = {"about": kind.card_about, "engines": kind.card_engines}
    environment = Environment(
        loader=ChoiceLoader([DictLoader(of_kind), FileSystemLoader(Path(__file__).parent)]),
        undefined=ChainableUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    environment.filters |= {"number": number, "words": words, "expected": expected}
    return environment


def number(value: Any, spec: str = ",.0f") -> str:
    """A number in a format; empty for an unknown or non-finite one."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return format(value, spec) if known else ""


def with_error(rate: Any, error: Any) -> str:
    """A rate and its standard error, `2.31 ± 0.05`; empty where the rate is unknown."""
    text, error = number(rate, ".2f"), number(error, ".2f")
    return f"{text} ± {error}" if text and error else text


def expected(promise: Any) -> str:
    """An expected acceleration rate and its standard error; empty where it is unknown."""
    return with_error(promise.get("expected_acceleration_rate"), promise.get("expected_standard_error"))


def words(value: Any) -> str:
    """A setting as the text of a table's cell."""
    if isinstance(value, Mapping):
        value = [f"{key} {item}" for key, item in value.items() if item is not None]
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return " ".join(text.replace("|", "\\|").split())
