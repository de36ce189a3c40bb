"""Verified files for repositories of the Hub, one commit each.

All files of all repositories are verified before the first is sent. Files that the Hub has are not
sent again; where it has all of them, no commit is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import RepositoryNotFoundError

from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.export.weights import WEIGHT_SUFFIXES
from pipeline.redact import redacted
from pipeline.storage.atomic import read_file
from pipeline.targets.files import hub_errors

EXPORT_AGAIN = "Run the run again: it makes what has changed anew and checks it."

Names = Collection[str]


@dataclass(frozen=True)
class Existing:
    """A repository as the Hub has it."""

    names: Names
    private: bool
    commit: str | None


@dataclass(frozen=True)
class Upload:
    """The files of one commit.

    Attributes:
        repo_id: USER/NAME.
        base_model: Stated in the receipt; a local path is refused before anything is sent.
        local_paths: Private paths: no file may contain one.
        conflicting: Selects, of the names in a repository, those that forbid writing to it.
        outdated: Selects, of the names in a repository, those that the commit deletes.
    """

    repo_id: str
    base_model: str | None
    files: list[CommitOperationAdd]
    message: str
    local_paths: Collection[str]
    conflicting: Callable[[Names], list[str]]
    outdated: Callable[[Names], list[str]] = lambda names: []
    repo_type: Literal["model", "dataset"] = "model"

    @property
    def missing(self) -> list[str]:
        """What a push still requires."""
        if self.base_model and os.path.isabs(self.base_model):
            return ["the Hub id of the target (push.base_model): nobody else can load a local one"]
        return []

    def receipt(self, private: bool) -> dict[str, Any]:
        files = []
        for file in self.files:
            info = file.upload_info
            files.append(
                {"path": file.path_in_repo, "size": info.size, "sha256": info.sha256.hex()}
            )
        return {
            "repo": self.repo_id,
            "private": private,
            "base_model": self.base_model,
            "files": files,
        }

    def dry_run(self, private: bool) -> dict[str, Any]:
        """The receipt without a commit; `missing` names what a push still requires. Uses no network
        and no token.
        """
        return {**self.receipt(private), "dry_run": True, "commit": None, "missing": self.missing}

    def require_publishable(self) -> None:
        """Raise ConfigError for a local base model, DataError where a file contains a private
        path.
        """
        for missing in self.missing:
            fix = "Publish the target first, then push with push.base_model=USER/NAME."
            raise ConfigError(f"The push lacks {missing}.", self.base_model, fix)
        for file in self.files:
            if Path(file.path_in_repo).suffix in WEIGHT_SUFFIXES:
                continue
            with file.as_file() as opened:
                content = opened.read()
            for path in self.local_paths:
                if path.encode() in content:
                    what = f"{file.path_in_repo} contains a local path."
                    raise DataError(what, path, "Remove the path from it, then push again.")

    def existing(self, api: HfApi, private: bool) -> Existing | None:
        """What the Hub has there, None if nothing.

        Raises:
            ConfigError: The repository is public and should be private, or holds something else.
        """
        try:
            info: Any = api.repo_info(self.repo_id, repo_type=self.repo_type)
        except RepositoryNotFoundError as error:
            if error.response.status_code == 404:
                return None
            raise
        names = {sibling.rfilename for sibling in info.siblings or ()}
        found = Existing(names, bool(info.private), info.sha)
        if private and not found.private:
            fix = "Make it private on the Hub, or push with push.private=false."
            raise ConfigError(
                "The repository is public, and push.private asks for a private one.",
                self.repo_id,
                fix,
            )
        if conflicting := self.conflicting(found.names):
            what = f"The repository holds something else ({', '.join(conflicting[:3])})."
            fix = (
                "Push to a repository of its own: engines and readers load every file that they"
                " find."
            )
            raise ConfigError(what, self.repo_id, fix)
        return found

    def send(self, api: HfApi, found: Existing | None, private: bool) -> dict[str, Any]:
        """Commit; return the receipt with "url", "commit" and "unchanged"."""
        if found is None:
            api.create_repo(self.repo_id, private=private, exist_ok=True, repo_type=self.repo_type)
        operations: list[CommitOperationAdd | CommitOperationDelete] = [*self.files]
        if found is not None:
            operations += [CommitOperationDelete(name) for name in self.outdated(found.names)]
        commit = api.create_commit(
            self.repo_id, operations, commit_message=self.message, repo_type=self.repo_type
        )
        place = self.repo_id if self.repo_type == "model" else f"datasets/{self.repo_id}"
        receipt = self.receipt(private if found is None else found.private)
        receipt["url"] = redacted(f"{api.endpoint}/{place}")
        receipt["commit"] = commit.oid
        receipt["unchanged"] = found is not None and found.commit == commit.oid
        return receipt


def send_all(uploads: Mapping[str, Upload], *, private: bool) -> dict[str, dict[str, Any]]:
    """Send uploads in their order; nothing is sent where one of them is refused. Returns the
    receipts.

    Args:
        private: Make new repositories private; an existing public one is an error, an existing
            private one stays so.

    Raises:
        ConfigError, DataError: One of them may not be published, or not there.
        EnvironmentFault: There is no token, or the Hub cannot be reached or refuses.
    """
    for upload in uploads.values():
        upload.require_publishable()
    token = get_token()
    if not token:
        fix = "Run `hf auth login`, or set HF_TOKEN to a token that may write; then push again."
        raise EnvironmentFault("There is no Hub token.", "push", fix)
    api = HfApi(token=token, library_name="medusa-distill")
    found, receipts = {}, {}
    for name, upload in uploads.items():
        with hub_errors(f"repository {upload.repo_id}", upload.repo_id, writes=True):
            found[name] = upload.existing(api, private)
    for name, upload in uploads.items():
        with hub_errors(f"repository {upload.repo_id}", upload.repo_id, writes=True):
            receipts[name] = upload.send(api, found[name], private)
    return receipts


def verified(
    directory: Path, checked: Mapping[str, str], written: Mapping[str, str]
) -> list[CommitOperationAdd]:
    """The checked files of a directory for one commit, sorted by name.

    Args:
        checked: The sha256 (hex) of each file as it was checked; no other file goes. Weights are
            read again while they are sent, and the Hub compares them with this sum; of any other
            file the bytes that were compared are sent.
        written: Texts that are written for the upload, in the place of the directory's files or
            besides them.

    Raises:
        DataError: A file is missing, or is not what was checked.
    """
    files = {name: _as_checked(directory, name, sha256) for name, sha256 in checked.items()}
    for name, text in written.items():
        files[name] = CommitOperationAdd(name, text.encode(errors="replace"))
    return [files[name] for name in sorted(files)]


def _as_checked(directory: Path, name: str, sha256: str) -> CommitOperationAdd:
    path = directory / name
    try:
        is_weights = path.suffix in WEIGHT_SUFFIXES and path.is_file()
        file = CommitOperationAdd(name, path if is_weights else read_file(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"A file of the export cannot be read: {error}.", str(path), EXPORT_AGAIN
        ) from error
    if path.is_symlink() or file.upload_info.sha256.hex() != sha256:
        raise DataError(
            "This file is not what was checked, so nothing was pushed.", str(path), EXPORT_AGAIN
        )
    return file
