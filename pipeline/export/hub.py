"""What goes to the Hub of heads and of a tuned backbone, each to its own repository.

Only after a passed check, without local paths, and only to a repository that is new or holds the
same kind of content and nothing else that engines would load. The conversations are in
`hub_data_set.py`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config import PushConfig
from pipeline.errors import CheckFailed, DataError
from pipeline.export.backbone import BACKBONE_FILE
from pipeline.export.card import backbone_card, model_card
from pipeline.export.card_facts import Published
from pipeline.export.layout import (
    CARD_FILE,
    CONFIG_FILE,
    read_json_config,
    read_layout,
    with_base_model,
)
from pipeline.export.upload import Upload, verified
from pipeline.export.weights import WEIGHT_SUFFIXES
from pipeline.heads.export_format import FORMATS
from pipeline.heads.kind import Heads
from pipeline.targets.files import check_repo_id


@dataclass(frozen=True)
class Repositories:
    """Where each part goes; None where it is not published."""

    heads: str | None = None
    backbone: str | None = None
    data_set: str | None = None

    def __iter__(self) -> Iterator[str]:
        for repo_id in (self.data_set, self.backbone, self.heads):
            if repo_id is not None:
                yield repo_id


def repositories(push: PushConfig, kind: type[Heads], target: str, *, tuned: bool) -> Repositories:
    """The repositories that `push` asks for.

    `push.repo_id` is that of the heads, or of a tuned backbone, whose heads go to
    `NAME-speculator.METHOD`, as the authors of vLLM's speculators name theirs. `USER/` alone is
    completed from the target's name.
    """
    suffix = f"-speculator.{kind.vllm_method or kind.Shape.kind}"
    name = (push.base_model or target).rstrip("/").rpartition("/")[2]
    data_set = _completed(push.dataset, f"{name}-self-distillation")
    if not tuned:
        return Repositories(_completed(push.repo_id, f"{name}{suffix}"), None, data_set)
    backbone = _completed(push.repo_id, f"{name}-tuned")
    heads = f"{backbone}{suffix}" if backbone else None
    return Repositories(heads, backbone, data_set)


def _completed(repo_id: str | None, name: str) -> str | None:
    if not repo_id:
        return None
    return f"{repo_id}{name}" if repo_id.endswith("/") else repo_id


def require_allowed(published: Published, where: str = "push.repo_id") -> str:
    """The repository's id; CheckFailed without a passed check, ConfigError for an id without owner
    and name.
    """
    check = published.report.get("check")
    if not check:
        raise CheckFailed(
            "These heads have not been checked.", "report.json", "Run the check stage, then push."
        )
    reasons = [str(reason).rstrip(".") for reason in check.get("failures") or ()]
    if reasons or check.get("passed") is not True:
        what = (
            f"The check of these heads failed: {'; '.join(reasons) or 'the check stage says so'}."
        )
        raise CheckFailed(what, "report.json", "Nothing was pushed; the report says more.")
    repo_id = published.repo_id or ""
    check_repo_id(repo_id, where, with_owner=True)
    return repo_id


def heads_upload(directory: Path, published: Published, checked: Mapping[str, str]) -> Upload:
    """An export with a fresh card and the Hub id of its target in `config.json`, compared with what
    was checked.

    Args:
        directory: An export. It is not changed.
        published: `base_model` is the heads' target, or None for the one that the export names.
        checked: The sha256 (hex) of each of the heads' files as it was checked, by name; no other
            file goes.

    Raises:
        CheckFailed: The check failed or was not run.
        DataError: The directory is not a whole export, or is not what was checked.
        ConfigError: An id is invalid.
    """
    repo_id = require_allowed(published)
    layout = read_layout(directory)
    base = published.base_model or layout.base_model_name_or_path
    if not os.path.isabs(base):
        check_repo_id(base, "push.base_model")
    _require_heads_alone(checked, layout.kind, directory)
    written = {CARD_FILE: model_card(replace(published, base_model=base))}
    for name in checked:
        if Path(name).name == CONFIG_FILE:  # one in each format's directory
            content, _ = read_json_config((directory / name).parent)
            written[name] = json.dumps(with_base_model(content, base), indent=2) + "\n"
    return Upload(
        repo_id=repo_id,
        base_model=base,
        files=verified(directory, checked, written),
        message=layout.kind.title,
        local_paths=local_paths(published, layout.base_model_name_or_path),
        conflicting=functools.partial(_not_heads, kind=layout.kind),
    )


def backbone_upload(directory: Path, published: Published, checked: Mapping[str, str]) -> Upload:
    """A tuned backbone with a card of its own, compared with what was checked; arguments as in
    `heads_upload`.
    """
    repo_id, directory = require_allowed(published), directory.resolve()
    if gone := {CONFIG_FILE, BACKBONE_FILE} - checked.keys():
        raise DataError(
            f"The tuned backbone lacks {', '.join(sorted(gone))}.", str(directory), "Export again."
        )
    return Upload(
        repo_id=repo_id,
        base_model=published.base_model,
        files=verified(directory, checked, {CARD_FILE: backbone_card(published)}),
        message="Backbone",
        local_paths=local_paths(published, str(directory)),
        conflicting=_not_a_backbone,
    )


def local_paths(published: Published, *further: str) -> set[str]:
    """The paths of this machine that a file may not contain."""
    models = (published.config.target.model, *further)
    return {model for model in models if os.path.isabs(model)}


def _require_heads_alone(names: Collection[str], kind: type[Heads], directory: Path) -> None:
    """Raise DataError where the heads are not whole, or other weights would go with them."""
    if gone := {CONFIG_FILE, kind.weights_file, kind.choices_file} - set(names):
        raise DataError(
            f"The export lacks {', '.join(sorted(gone))}.", str(directory), "Export again."
        )
    if strangers := _other_weights(names, kind):
        fix = (
            "Push them to a repository of their own: engines load every weights file that they"
            " find."
        )
        raise DataError(
            f"Other weights lie beside the heads: {', '.join(strangers)}.", str(directory), fix
        )


def _other_weights(names: Collection[str], kind: type[Heads]) -> list[str]:
    """Weights that engines would load with the heads: those of another format are in a directory of
    its name.
    """
    weights = [
        name for name in names if Path(name).suffix in WEIGHT_SUFFIXES and name != kind.weights_file
    ]
    return sorted(name for name in weights if str(Path(name).parent) not in FORMATS)


def _not_heads(names: Collection[str], kind: type[Heads]) -> list[str]:
    """The files that conflict with heads: other weights, or a model without a tree."""
    others = _other_weights(names, kind)
    if others or kind.choices_file in names:
        return others
    return sorted({CONFIG_FILE, kind.weights_file} & set(names))


def _not_a_backbone(names: Collection[str]) -> list[str]:
    """The files that conflict with a tuned backbone: any model that was not tuned by this
    project.
    """
    if BACKBONE_FILE in names:
        return []
    return sorted(
        name for name in names if Path(name).suffix in WEIGHT_SUFFIXES or name == CONFIG_FILE
    )
