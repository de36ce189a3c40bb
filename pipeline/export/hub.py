"""Publishes the heads, and with Medusa-2 the tuned backbone, each to its own repository.

The conversations are `hub_data_set.py`'s.

Only after a passed check, without local paths, and only to a repository that is new or holds the same kind of content
and nothing else that engines would load. Pushing again is safe, see `upload.py`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.config import PushConfig
from pipeline.errors import CheckFailed, DataError
from pipeline.export.backbone import BACKBONE_FILE
from pipeline.export.card import backbone_card, model_card
from pipeline.export.layout import (
    BACKBONE_DIRECTORY,
    CARD_FILE,
    CONFIG_FILE,
    read_json_config,
    read_layout,
    with_base_model,
)
from pipeline.export.parcel import Parcel, Push
from pipeline.export.upload import WEIGHT_SUFFIXES, check_repo_id, prepare
from pipeline.heads.export_format import FORMATS
from pipeline.heads.kind import Heads


@dataclass(frozen=True)
class Repositories:
    """Where each part goes; None where it is not published."""

    heads: str | None = None
    backbone: str | None = None
    data_set: str | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(filter(None, (self.data_set, self.backbone, self.heads)))


def repositories(push: PushConfig, kind: type[Heads], target: str, *, tuned: bool) -> Repositories:
    """The repositories that `push` asks for.

    `push.repo_id` is that of the heads, or of a tuned backbone, whose heads go to `NAME-speculator.METHOD`, as the
    authors of vLLM's speculators name theirs. `USER/` alone is completed from the target's name.
    """
    suffix = f"-speculator.{kind.vllm_method or kind.Shape.kind}"
    name = (push.base_model or target).rstrip("/").rpartition("/")[2]
    data_set = f"{push.dataset}{name}-self-distillation" if _is_owner(push.dataset) else push.dataset
    if not push.repo_id:
        return Repositories(data_set=data_set)
    completed = f"{push.repo_id}{name}{'-tuned' if tuned else suffix}" if _is_owner(push.repo_id) else push.repo_id
    if tuned:
        return Repositories(f"{completed}{suffix}", completed, data_set)
    return Repositories(completed, None, data_set)


def _is_owner(repo_id: str | None) -> bool:
    return bool(repo_id) and str(repo_id).endswith("/")


def push_export(directory: str | Path, push: Push, checked: Mapping[str, str]) -> dict[str, Any]:
    """Push an export with a freshly rendered model card, as one commit; return the receipt of `Parcel.send`.

    Arguments and what is raised are those of `prepare_export`.
    """
    return prepare_export(directory, push, checked).send()


def prepare_export(directory: str | Path, push: Push, checked: Mapping[str, str]) -> Parcel:
    """An export with a freshly rendered model card, compared with what was checked and ready to go.

    Args:
        directory: An export. It is not changed; `config.json` and the card are rewritten for the upload.
        checked: The sha256 (hex) of each of the heads' files as it was checked, by name; no other file goes.

    Raises:
        CheckFailed: The check failed or was not run.
        DataError: The directory is not a whole export, is not what was checked, or names the target's local path where
            it should not.
        ConfigError: An id is invalid.
    """
    directory = Path(directory)
    check_repo_id(push.repo_id, "push.repo_id", with_owner=True)
    report = require_passed_check(push.report)
    exported = read_layout(directory)
    base = push.base_model or exported.base_model_name_or_path
    if not os.path.isabs(base):
        check_repo_id(base, "push.base_model")
    kind, tuned = exported.kind, (directory / BACKBONE_DIRECTORY / BACKBONE_FILE).is_file()
    push = replace(push, base_model=base)
    card = model_card(report, kind=kind, tuned=tuned, **push.for_the_card)
    configs = _configs(directory, checked, base)
    _require_heads_alone(checked, kind, directory)
    additions = prepare(directory, checked, {CARD_FILE: card.encode(errors="replace"), **configs})
    in_the_way = functools.partial(_not_heads, kind=kind)
    return Parcel.of(push, additions, exported.base_model_name_or_path, kind.title, in_the_way)


def prepare_backbone(
    directory: str | Path, push: Push, checked: Mapping[str, str], *, heads_repo_id: str, kind: type[Heads]
) -> Parcel:
    """The tuned backbone with a model card of its own, compared with what was checked and ready to go.

    Args:
        directory: A tuned backbone, as `write_backbone` writes it.
        checked: The sha256 (hex) of each of its files as it was checked, by name; no other file goes.
        heads_repo_id, kind: Where its heads are, or will be, and what they are.

    What is raised is that of `prepare_export`.
    """
    directory = Path(directory).resolve()
    check_repo_id(push.repo_id, "push.repo_id", with_owner=True)
    report = require_passed_check(push.report)
    if gone := {CONFIG_FILE, BACKBONE_FILE} - checked.keys():
        raise DataError(f"The tuned backbone lacks {', '.join(sorted(gone))}.", str(directory), "Export again.")
    card = backbone_card(report, heads_repo_id=heads_repo_id, kind=kind, **push.for_the_card)
    additions = prepare(directory, checked, {CARD_FILE: card.encode(errors="replace")})
    return Parcel.of(push, additions, str(directory), "Backbone", _not_a_backbone)


def require_passed_check(report: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The report, if its check passed; CheckFailed with the reasons otherwise."""
    check = (report or {}).get("check")
    if report is None or not check:
        raise CheckFailed("These heads have not been checked.", "report.json", "Run the check stage, then push.")
    reasons = [str(reason).rstrip(".") for reason in check.get("failures") or ()]
    if reasons or check.get("passed") is not True:
        failed = f"The check of these heads failed: {'; '.join(reasons) or 'the check stage says so'}."
        raise CheckFailed(failed, "report.json", "Nothing was pushed; the report says more.")
    return report


def _configs(directory: Path, names: Collection[str], base: str) -> dict[str, bytes]:
    """The `config.json` of each format, with the target's Hub id."""
    configs = {}
    for name in (name for name in names if Path(name).name == CONFIG_FILE):
        content, _ = read_json_config((directory / name).parent)
        configs[name] = (json.dumps(with_base_model(content, base), indent=2) + "\n").encode()
    return configs


def _require_heads_alone(names: Collection[str], kind: type[Heads], directory: Path) -> None:
    """Raise DataError where the heads are not whole, or other weights would go with them."""
    if gone := {CONFIG_FILE, kind.weights_file, kind.choices_file} - set(names):
        raise DataError(f"The export lacks {', '.join(sorted(gone))}.", str(directory), "Export again.")
    if strangers := _other_weights(names, kind):
        fix = "Push them to a repository of their own: engines load every weights file that they find."
        raise DataError(f"Other weights lie beside the heads: {', '.join(strangers)}.", str(directory), fix)


def _other_weights(names: Collection[str], kind: type[Heads]) -> list[str]:
    """Weights that engines would load with the heads: those of another format are in a directory of its name."""
    weights = (name for name in names if Path(name).suffix in WEIGHT_SUFFIXES and name != kind.weights_file)
    return sorted(name for name in weights if str(Path(name).parent) not in FORMATS)


def _not_heads(names: Collection[str], kind: type[Heads]) -> list[str]:
    """The files that conflict with heads: other weights, or a model without a tree."""
    of_a_model = {CONFIG_FILE, kind.weights_file} & set(names)
    return _other_weights(names, kind) or ([] if kind.choices_file in names else sorted(of_a_model))


def _not_a_backbone(names: Collection[str]) -> list[str]:
    """The files that conflict with a tuned backbone: any model that was not tuned by this project."""
    models = [name for name in names if Path(name).suffix in WEIGHT_SUFFIXES or name == CONFIG_FILE]
    return [] if BACKBONE_FILE in names else sorted(models)
