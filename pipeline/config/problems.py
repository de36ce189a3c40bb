"""What is wrong with settings, in people's words: pydantic's findings, and the keys that were most
likely meant.

A key that may be one thing or another (a number or `auto`) is one problem: what it may be, and what
it is.
"""

from __future__ import annotations

import datetime
import difflib
import json
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from pipeline.config import Config

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "date": "a date",
    "tuple": "a list",
    "list": "a list",
    "dict": "a section with keys",
    "model": "a section with keys",
}


GONE_KEYS = {
    "train.shard_heads": (
        "use train.medusa.lm_head: shared, train.optimizer: adamw-8bit or train.heads: recurrent"
    ),
}


def problems(errors: Sequence[Any]) -> list[str]:
    """Each wrong key once, from `ValidationError.errors()`."""
    by_key: dict[str, list[Any]] = {}
    for error in errors:
        by_key.setdefault(_location(error), []).append(error)
    return [_problem(location, found) for location, found in by_key.items()]


def _location(error: Any) -> str:
    # Behind a key that may be a number or a word pydantic names the alternative, such as
    # `constrained-int`.
    parts = map(str, error["loc"])
    return ".".join(
        part
        for part in parts
        if part not in (*KINDS, "[key]") and not part.startswith(("constrained-", "literal["))
    )


def _problem(location: str, errors: list[Any]) -> str:
    first = errors[0]
    if first["type"] == "extra_forbidden":
        if location in GONE_KEYS:
            return f"'{location}' is gone: {GONE_KEYS[location]}"
        near = nearest_key(first["loc"])
        return f"there is no key '{location}'" + (f"; did you mean '{near}'?" if near else "")
    if first["type"] == "missing":
        return f"'{location}' is needed"
    said, *others = dict.fromkeys(map(_wanted, errors))
    said = " or ".join([said, *(other.removeprefix("it must be ") for other in others)])
    if first["type"] == "value_error" and isinstance(
        first["input"], dict
    ):  # of keys that do not go together
        return f"'{location}': {said}"
    return f"'{location}': {said}, not {_shown(first['input'])}"


def _wanted(error: Any) -> str:
    """What would be right; of a value error of ours its own words."""
    kind, _, finding = error["type"].partition("_")
    if (
        finding in ("type", "parsing", "from_float", "attributes_type", "from_date_parsing")
        and kind in KINDS
    ):
        return f"it must be {KINDS[kind]}"
    if error["type"] == "literal_error":
        return f"it must be {error['ctx']['expected']}"
    if error["type"] == "too_long":
        return f"it must be a list of at most {error['ctx']['max_length']}"
    message = error["msg"].removeprefix("Value error, ").replace("Input should", "it must")
    return f"{message[0].lower()}{message[1:]}"


def _shown(value: Any) -> str:
    """A value as it would be written."""
    if isinstance(value, datetime.date):
        return value.isoformat()
    text = (
        json.dumps(value, ensure_ascii=False, default=str)
        if not isinstance(value, str)
        else repr(value)
    )
    return text if len(text) <= 80 else f"{text[:76]} ..."


def nearest_key(location: tuple[str | int, ...]) -> str | None:
    """The key that was most likely meant by one that does not exist, such as ('train',
    'lora_rank').

    First one beside it that is nearly the same; then a key that has moved: with the same last name,
    or with all the words of the wrong one. Last one whose name is similar, beside it or elsewhere
    in its section.
    """
    parts = [part for part in location if isinstance(part, str)]
    section, name, wrong = parts[0], parts[-1], ".".join(parts)
    if len(parts) == 1:
        return next(iter(difflib.get_close_matches(name, Config.model_fields, n=1)), None)
    leaves = list(_leaves(Config))
    beside = {
        key[-1]: ".".join(map(str, (*location[:-1], key[-1])))
        for key in leaves
        if list(key[:-1]) == parts[:-1]
    }
    within = {key[-1]: ".".join(key) for key in leaves if key[0] == section}
    if near := difflib.get_close_matches(name, beside, n=1, cutoff=0.85):
        return beside[near[0]]
    if moved := [key for key in leaves if key[-1] == name or _words(parts) <= _words(key)]:
        moved = [key for key in moved if key[0] == section] or moved
        return ".".join(
            max(moved, key=lambda key: difflib.SequenceMatcher(None, wrong, ".".join(key)).ratio())
        )
    for keys in (beside, within):
        if near := difflib.get_close_matches(name, keys, n=1):
            return keys[near[0]]
    return None


def _words(key: Iterable[str]) -> set[str]:
    return {word for part in key for word in part.split("_")}


def _leaves(model: type[BaseModel], parents: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key as the names that lead to it."""
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        yield from _leaves(inner, (*parents, name)) if inner else iter([(*parents, name)])


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings class inside an annotation such as `tuple[SeedSource, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (tuple, list, Union, types.UnionType):
        return next((found for found in map(_model_in, get_args(annotation)) if found), None)
    return None
