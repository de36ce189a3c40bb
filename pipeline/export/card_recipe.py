"""How a card's figures are made again: the run's configuration without this machine's paths, and a command for each.

Settings that have their default are left out.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

from pipeline.config import Config

SECTIONS = ("target", "seeds", "generate", "features", "train", "calibrate", "export", "check")
RUN = "medusa-distill run recipe.yaml"


def recipe_yaml(recipe: Mapping[str, Any], revision: str | None = None) -> str:
    """The configuration as YAML; empty where it names no target. A local path stands as `PATH_TO_…`.

    Args:
        recipe: The run's resolved configuration as plain data.
        revision: The commit of a Hub target that was read.
    """
    if not (recipe.get("target") or {}).get("model"):
        return ""
    kept = _chosen({name: recipe[name] for name in SECTIONS if recipe.get(name)}, Config)
    if revision:
        kept["target"]["revision"] = revision
    run = {"name": "reproduction", "seed": (recipe.get("run") or {}).get("seed", 0)}
    return yaml.safe_dump({"run": run, **_without_paths(kept)}, sort_keys=False, allow_unicode=True, width=100)


def commands(recipe: Mapping[str, Any], *, served: bool) -> list[tuple[str, str]]:
    """What is measured, and the command that measures it."""
    engines = (recipe.get("check") or {}).get("engines") or ("native", *(["vllm"] if served else []))
    figures = {"native": "results of native decoding, also by category", "vllm": "results in vLLM"}
    return [
        ("the training text", f"{RUN} --until generate"),
        ("accuracies, the tree, what it and each chain is predicted to reach", f"{RUN} --until calibrate"),
        *((figures[name], f"{RUN} --until check 'check.engines=[{name}]'") for name in engines),
    ]


def _chosen(values: Mapping[str, Any], model: type[BaseModel]) -> dict[str, Any]:
    """The settings that differ from their default."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        field = model.model_fields.get(key)
        if field is None:
            continue
        if isinstance(value, Mapping) and isinstance(field.annotation, type):
            inner = _chosen(value, field.annotation) if issubclass(field.annotation, BaseModel) else dict(value)
            found |= {key: inner} if inner else {}
        elif field.is_required() or value != to_jsonable_python(field.get_default(call_default_factory=True)):
            found[key] = value
    return found


def _without_paths(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        return {name: _without_paths(item, name) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_paths(item, key) for item in value]
    return f"PATH_TO_{key.upper()}" if isinstance(value, str) and os.path.isabs(value) else value
