"""Uploads of heads and of a tuned backbone to the Hub, one commit per repository.

Nothing is uploaded before everything is verified: the check has passed, all files are the checked
ones, no file but weights contains a local path of a model, and no repository holds anything else
that engines would load.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelInfo, get_token
from huggingface_hub.errors import RepositoryNotFoundError
from rich.console import Console

from pipeline.config import PushConfig
from pipeline.errors import CheckFailed, ConfigError, DataError, EnvironmentFault
from pipeline.export.backbone import BACKBONE_FILE
from pipeline.export.card import Published, backbone_card, model_card
from pipeline.export.layout import CARD_FILE, CONFIG_FILE, read_layout, with_base_model
from pipeline.export.weights import WEIGHT_SUFFIXES
from pipeline.formatting import visible
from pipeline.heads.kind import Heads
from pipeline.heads.shapes import FORMATS
from pipeline.redact import redacted
from pipeline.storage.atomic import read_file, read_object
from pipeline.storage.fingerprint import FileFacts
from pipeline.targets.files import check_repo_id, hub_errors

COMMIT_MESSAGE = "Upload from medusa-distill"
EXPORT_AGAIN = "Run again: stages whose files have changed run again, and the check too."

Receipt = dict[str, Any]  # the content of receipt.json


@dataclass(frozen=True)
class Repositories:
    """The Hub repositories of a push; None for a part that is not published."""

    heads: str | None
    backbone: str | None

    def __iter__(self) -> Iterator[str]:
        for repo_id in (self.backbone, self.heads):
            if repo_id is not None:
                yield repo_id


def repositories(push: PushConfig, kind: type[Heads], target: str, *, tuned: bool) -> Repositories:
    """Return the Hub repositories of a push: of the heads and the tuned backbone.

    `push.repo_id` is the heads' repository. With a tuned backbone it is the backbone's, and the
    heads go to `NAME-speculator.METHOD`, the naming of vLLM's speculators. `USER/` alone is
    completed with the target's name.
    """
    suffix = f"-speculator.{kind.vllm_method or kind.Shape.kind}"
    name = (push.base_model or target).rstrip("/").rpartition("/")[2]
    backbone = None
    heads = _completed(push.repo_id, f"{name}{suffix}")
    if tuned and push.repo_id:
        backbone = _completed(push.repo_id, f"{name}-tuned")
        heads = f"{backbone}{suffix}"
    return Repositories(heads, backbone)


def _completed(repo_id: str | None, name: str) -> str | None:
    """Complete the Hub id `USER/` by a repository name; return None for an empty id."""
    if not repo_id:
        return None
    return f"{repo_id}{name}" if repo_id.endswith("/") else repo_id


@dataclass(frozen=True)
class Upload(ABC):
    """An upload to one Hub repository, sent as one commit.

    Attributes:
        repo_id: USER/NAME.
        base_model: The base model's Hub id, for the receipt. A local path prevents the upload.
        local_paths: Private paths, which no file except weights may contain.
    """

    repo_id: str
    base_model: str | None
    files: list[CommitOperationAdd]
    local_paths: Collection[str]

    @abstractmethod
    def conflicting(self, names: Collection[str]) -> list[str]:
        """Select the file names in a Hub repository that prevent the upload."""

    def receipt(self, private: bool) -> Receipt:
        """Return the receipt of an upload to the Hub: repository, privacy, base model and files."""
        files = []
        for file in self.files:
            size, sha256 = file.upload_info.size, file.upload_info.sha256.hex()
            files.append({"path": file.path_in_repo, "size": size, "sha256": sha256})
        return {
            "repo": self.repo_id,
            "private": private,
            "base_model": self.base_model,
            "files": files,
        }

    def dry_run(self, private: bool) -> Receipt:
        """Return the receipt of an upload to the Hub that is not sent.

        The commit is None. No network is needed.
        """
        return {**self.receipt(private), "dry_run": True, "commit": None}

    def require_base_model(self) -> None:
        """Raise ConfigError if the base model is local, so that nobody else can load it."""
        if self.base_model and os.path.isabs(self.base_model):
            raise ConfigError(
                "The push needs the target's Hub id: nobody else can load a local target.",
                self.base_model,
                "Publish the target, then set push.base_model to its id.",
            )

    def require_publishable(self) -> None:
        """Refuse an upload to the Hub with a local base model, or a local path in a file.

        Weights are not searched.

        Raises:
            ConfigError: The base model is local.
            DataError: A file contains one of `local_paths`.
        """
        self.require_base_model()
        for file in self.files:
            if Path(file.path_in_repo).suffix in WEIGHT_SUFFIXES:
                continue
            with file.as_file() as opened:
                content = opened.read()
            for path in self.local_paths:
                if path.encode() in content:
                    raise DataError(
                        f"{file.path_in_repo} contains a local path.",
                        path,
                        "Remove the path from it, then push again.",
                    )

    def require_suitable(self, existing: ModelInfo, private: bool) -> None:
        """Check that an existing Hub repository may receive the upload.

        Args:
            private: Refuse a public repository.

        Raises:
            ConfigError: The repository is public but must be private, or has conflicting files.
        """
        if private and not existing.private:
            raise ConfigError(
                "The repository is public, and push.private asks for a private one.",
                self.repo_id,
                "Make it private on the Hub, or `run` with push.private=false.",
            )
        names = {sibling.rfilename for sibling in existing.siblings or ()}
        conflicting = self.conflicting(names)
        if conflicting:
            raise ConfigError(
                f"The repository holds something else ({', '.join(conflicting[:3])}).",
                self.repo_id,
                "Push to an empty repository: engines load every file in it.",
            )

    def send(self, api: HfApi, existing: ModelInfo | None, private: bool) -> Receipt:
        """Commit the files to the Hub; return the receipt with "url", "commit" and "unchanged".

        A missing repository is created.
        """
        if existing is None:
            api.create_repo(self.repo_id, private=private, exist_ok=True)
        else:
            private = bool(existing.private)
        commit = api.create_commit(self.repo_id, self.files, commit_message=COMMIT_MESSAGE)
        receipt = self.receipt(private)
        receipt["url"] = redacted(str(commit.repo_url))
        receipt["commit"] = commit.oid
        receipt["unchanged"] = existing is not None and existing.sha == commit.oid
        return receipt


def send_all(uploads: Mapping[str, Upload], *, private: bool) -> dict[str, Receipt]:
    """Send all uploads to the Hub in order, or none if one is refused; return the receipts.

    If the Hub fails while they are sent, the earlier uploads stay.

    Args:
        private: Make new repositories private. An existing public repository is an error. An
            existing private repository stays private, whatever this says.

    Raises:
        ConfigError, DataError: An upload may not be published, or not to this repository.
        EnvironmentFault: There is no token, or the Hub cannot be reached or refuses.
    """
    for upload in uploads.values():
        upload.require_publishable()
    token = get_token()
    if not token:
        raise EnvironmentFault(
            "There is no Hub token.",
            "push",
            "Run `hf auth login`, or set HF_TOKEN to a token that may write; then push again.",
        )
    api = HfApi(token=token, library_name="medusa-distill")
    existing = {}
    receipts = {}
    for name, upload in uploads.items():
        with hub_errors(f"repository {upload.repo_id}", upload.repo_id, writes=True):
            found = _existing(api, upload.repo_id)
        if found is not None:
            upload.require_suitable(found, private)
        existing[name] = found
    for name, upload in uploads.items():
        with hub_errors(f"repository {upload.repo_id}", upload.repo_id, writes=True):
            receipts[name] = upload.send(api, existing[name], private)
    return receipts


def _existing(api: HfApi, repo_id: str) -> ModelInfo | None:
    """Fetch the Hub's information about a repository; None if there is no such repository."""
    try:
        return api.model_info(repo_id)
    except RepositoryNotFoundError as error:
        if error.response.status_code == 404:
            return None
        raise  # 401: the token is invalid


@dataclass(frozen=True)
class HeadsUpload(Upload):
    """An upload of an export of heads to a Hub repository."""

    kind: type[Heads]

    def conflicting(self, names: Collection[str]) -> list[str]:
        """Return the files that prevent an upload of heads to the Hub repository.

        These are weights that are not of an export. If there are none, and the repository has no
        choices file, they are config.json and the heads' weights file, which then belong to another
        model.
        """
        others = []
        for name in sorted(names):
            is_weights = Path(name).suffix in WEIGHT_SUFFIXES and name != self.kind.weights_file
            if is_weights and str(Path(name).parent) not in FORMATS:
                others.append(name)
        if others or self.kind.choices_file in names:
            return others
        return sorted({CONFIG_FILE, self.kind.weights_file} & set(names))


class BackboneUpload(Upload):
    """An upload of a tuned backbone to a Hub repository."""

    def conflicting(self, names: Collection[str]) -> list[str]:
        """Return the Hub repository's model files, unless they are a backbone of this project."""
        if BACKBONE_FILE in names:
            return []
        weights = {name for name in names if Path(name).suffix in WEIGHT_SUFFIXES}
        return sorted(weights | ({CONFIG_FILE} & set(names)))


def heads_upload(directory: Path, published: Published, checked: Mapping[str, FileFacts]) -> Upload:
    """Prepare the Hub upload of an export, with a new card and the target's Hub id in config.json.

    Args:
        directory: The export, which is not changed.
        published: If `base_model` is None, the target is the one that the export names.
        checked: The facts of each checked file of the heads, by name. No other file is uploaded.

    Raises:
        CheckFailed: The check failed or was not run.
        DataError: A file is missing, or is not what was checked.
        ConfigError: An id is invalid.
    """
    repo_id = _require_allowed(published)
    layout = read_layout(directory)
    base = published.base_model or layout.base_model_name_or_path
    if not os.path.isabs(base):
        check_repo_id(base, "push.base_model")
    written = {CARD_FILE: model_card(replace(published, base_model=base))}
    for name in checked:
        if Path(name).name == CONFIG_FILE:  # each format's directory has a config.json
            content = read_object(directory / name)
            written[name] = json.dumps(with_base_model(content, base), indent=2) + "\n"
    return HeadsUpload(
        repo_id=repo_id,
        base_model=base,
        files=_verified_files(directory, checked, written),
        local_paths=_local_paths(published, layout.base_model_name_or_path),
        kind=layout.kind,
    )


def backbone_upload(
    directory: Path, published: Published, checked: Mapping[str, FileFacts]
) -> Upload:
    """Prepare the Hub upload of a tuned backbone, with a new card.

    Args:
        directory: The tuned backbone, which is not changed.
        published: `base_model` is the model that the backbone was tuned from.
        checked: The facts of each checked file, by name. No other file is uploaded.

    Raises:
        CheckFailed: The check failed or was not run.
        DataError: A file is missing, or is not what was checked.
        ConfigError: The repository's id is invalid.
    """
    repo_id = _require_allowed(published)
    directory = directory.resolve()
    return BackboneUpload(
        repo_id=repo_id,
        base_model=published.base_model,
        files=_verified_files(directory, checked, {CARD_FILE: backbone_card(published)}),
        local_paths=_local_paths(published, str(directory)),
    )


def _require_allowed(published: Published) -> str:
    """Return the id of the Hub repository to push to, after verifying that the check passed.

    Raises:
        CheckFailed: The check failed or was not run.
        ConfigError: The id is invalid, or has no owner.
    """
    check = published.report.check
    if not check or not check.passed:
        raise CheckFailed(
            "The check of these heads failed, or was not run, so nothing was pushed.",
            "report.json",
            "The report names the reasons; check again.",
        )
    repo_id = published.repo_id or ""
    check_repo_id(repo_id, "push.repo_id", with_owner=True)
    return repo_id


def _local_paths(published: Published, *further: str) -> set[str]:
    """Return the absolute paths among a run's models, which no text on the Hub may contain."""
    models = (published.config.target.model, *further)
    return {model for model in models if os.path.isabs(model)}


def _verified_files(
    directory: Path, checked: Mapping[str, FileFacts], written: Mapping[str, str]
) -> list[CommitOperationAdd]:
    """Return a Hub upload's files, sorted by name: the checked files and the `written` texts.

    The Hub compares uploaded weights with their checked sha256. For any other file, the bytes that
    were compared here are the bytes that are uploaded.

    Raises:
        DataError: A file is missing, or is not what was checked.
    """
    files = {}
    for name, facts in checked.items():
        path = directory / name
        is_weights = path.suffix in WEIGHT_SUFFIXES
        try:
            file = CommitOperationAdd(name, path if is_weights else read_file(path))
        except (OSError, ValueError) as error:
            raise DataError(
                f"A file of the export cannot be read: {error}.",
                path,
                EXPORT_AGAIN,
            ) from error
        if path.is_symlink() or file.upload_info.sha256.hex() != facts.sha256:
            raise DataError(
                "This file is not what was checked, so nothing was pushed.",
                path,
                EXPORT_AGAIN,
            )
        files[name] = file
    for name, text in written.items():
        files[name] = CommitOperationAdd(name, text.encode(errors="replace"))
    return [files[name] for name in sorted(files)]


def print_dry_run(console: Console, receipts: Mapping[str, Receipt]) -> None:
    """Print what a push would send: repositories, and files with their sizes."""
    for part in receipts.values():
        visibility = "private" if part["private"] else "public"
        lines = [f"Would push to {part['repo']} ({visibility}), as one commit:"]
        for file in part["files"]:
            lines.append(f"  {file['size']:>14,} bytes  {visible(file['path'])}")
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
