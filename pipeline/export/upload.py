"""Uploads files to a repository of the Hub as one commit; error messages never contain the token.

Files that the Hub already has are not sent again; if it has all of them, no commit is made. Each file is read once for
its sha256, which is also in the receipt.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, DatasetInfo, HfApi, ModelInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from pipeline.errors import ConfigError, DataError, EnvironmentFault, MedusaDistillError
from pipeline.redact import redacted

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
EXPORT_AGAIN = "Run the run again: it finds what has changed, makes it anew and checks it."
CONTINUES = "Run the same command again: what has arrived is not sent twice."

RepoType = Literal["model", "dataset"]
RepoInfo = ModelInfo | DatasetInfo
InTheWay = Callable[[Collection[str]], list[str]]  # of the names in a repository, those that forbid writing to it


def check_repo_id(repo_id: str, where: str, *, with_owner: bool = False) -> None:
    """Raise ConfigError unless this is a Hub id; `with_owner` requires USER/NAME."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(
            f'"{repo_id}" is neither a Hub id nor an absolute path.', where, "Write a Hub id as USER/NAME."
        ) from error
    if with_owner and "/" not in repo_id:
        raise ConfigError(f'"{repo_id}" does not say whose repository it is.', where, "Write it as USER/NAME.")


def prepare(directory: Path, checked: Mapping[str, str], instead: Mapping[str, bytes]) -> list[CommitOperationAdd]:
    """The checked files of a directory as operations of one commit, sorted by name; nothing else goes.

    Args:
        checked: The sha256 (hex) of each file as it was checked. Weights are read again while they are sent, and the
            Hub compares what arrives with this sum; of any other file the bytes that were compared are sent.
        instead: Files that are written for the upload, in the place of the directory's or besides them.

    Raises:
        DataError: A file is missing, or is not what was checked.
    """
    additions = [_as_checked(directory, name, sha256) for name, sha256 in checked.items()]
    additions = [addition for addition in additions if addition.path_in_repo not in instead]
    additions += [CommitOperationAdd(name, content) for name, content in instead.items()]
    return sorted(additions, key=lambda addition: addition.path_in_repo)


def _as_checked(directory: Path, name: str, sha256: str) -> CommitOperationAdd:
    path = directory / name
    try:
        is_weights = path.suffix in WEIGHT_SUFFIXES
        addition = CommitOperationAdd(name, path if is_weights else path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"A file of the export cannot be read: {error}.", str(path), EXPORT_AGAIN) from error
    if addition.upload_info.sha256.hex() != sha256:
        raise DataError("This file is not what was checked, so nothing was pushed.", str(path), EXPORT_AGAIN)
    return addition


def listing(additions: list[CommitOperationAdd]) -> list[dict[str, Any]]:
    infos = [(file.path_in_repo, file.upload_info) for file in additions]
    return [{"path": path, "size": info.size, "sha256": info.sha256.hex()} for path, info in infos]


def refuse_local_paths(additions: list[CommitOperationAdd], base: str, recipe: Mapping[str, Any]) -> None:
    """Raise DataError where a file names a local target or `base`, as a tokenizer's settings may; not for weights."""
    local = {path for path in (base, (recipe.get("target") or {}).get("model", "")) if os.path.isabs(path)}
    for addition in additions:
        if Path(addition.path_in_repo).suffix in WEIGHT_SUFFIXES:
            continue
        with addition.as_file() as file:
            content = file.read()
        if path := next((path for path in local if path.encode() in content), None):
            fix = "Remove the path from it, then push again."
            raise DataError(f"{addition.path_in_repo} names the target's local path.", path, fix)


def upload(
    additions: list[CommitOperationAdd],
    repo_id: str,
    message: str,
    *,
    in_the_way: InTheWay,
    private: bool,
    repo_type: RepoType = "model",
    stale: InTheWay = lambda names: [],
) -> dict[str, Any]:
    """Upload missing files and commit; {"url", "commit", "unchanged", "private"}.

    Args:
        stale: Of the names in the repository, those that the commit deletes.

    Raises:
        ConfigError: The repository is public and should be private, or holds something else.
        EnvironmentFault: No token, or the Hub could not be reached or rejected the request.
    """
    if not (token := get_token()):
        fix = "Run `hf auth login`, or set HF_TOKEN to a token that may write; then push again."
        raise EnvironmentFault("There is no Hub token.", "push", fix)
    api = HfApi(token=token, library_name="medusa-distill")
    with _hub_faults(repo_id, token):
        existing = _existing(api, repo_id, repo_type)
        if existing is None:
            api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type)
        else:
            _require_ours(existing, repo_id, private, in_the_way)
        gone = [CommitOperationDelete(name) for name in stale(_names(existing))]
        commit = api.create_commit(repo_id, [*additions, *gone], commit_message=message, repo_type=repo_type)
    place = repo_id if repo_type == "model" else f"{repo_type}s/{repo_id}"
    return {
        "url": redacted(f"{api.endpoint}/{place}"),
        "commit": commit.oid,
        "unchanged": existing is not None and existing.sha == commit.oid,
        "private": private if existing is None else bool(existing.private),
    }


def _existing(api: HfApi, repo_id: str, repo_type: RepoType) -> RepoInfo | None:
    try:
        return api.model_info(repo_id) if repo_type == "model" else api.dataset_info(repo_id)
    except HfHubHTTPError as error:
        if error.response.status_code == 404 or error.response.headers.get("X-Error-Code") == "RepoNotFound":
            return None
        raise


def _names(existing: RepoInfo | None) -> set[str]:
    return {sibling.rfilename for sibling in existing.siblings or ()} if existing else set()


def _require_ours(existing: RepoInfo, repo_id: str, private: bool, in_the_way: InTheWay) -> None:
    """Raise ConfigError for a public repository that should be private, or one with other content."""
    if private and not existing.private:
        fix = "Make it private on the Hub, or push with push.private=false."
        raise ConfigError("The repository is public, and push.private asks for a private one.", repo_id, fix)
    if strangers := in_the_way(_names(existing)):
        fix = "Push to a repository of its own: engines and readers load every file that they find."
        raise ConfigError(f"The repository holds something else ({', '.join(strangers[:3])}).", repo_id, fix)


@contextlib.contextmanager
def _hub_faults(repo_id: str, token: str) -> Iterator[None]:
    """Translate the Hub client's errors, without the token."""
    try:
        yield
    except MedusaDistillError:
        raise
    except OfflineModeIsEnabled:
        raise EnvironmentFault("The Hub is switched off.", "HF_HUB_OFFLINE", "Unset it, then push again.") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        allowed = "The token must be valid and may write there: `hf auth login`, or HF_TOKEN. Then push again."
        fix = allowed if status in (401, 403) else CONTINUES
        raise EnvironmentFault(f"The Hub answered {status}: {_plain(error, token)}.", repo_id, fix) from None
    except (HTTPError, OSError, RuntimeError, ValueError) as error:  # LFS and hf_xet wrap theirs in the last two
        raise EnvironmentFault(f"The push did not get through: {_plain(error, token)}.", repo_id, CONTINUES) from None


def _plain(error: BaseException, token: str) -> str:
    """An error and its cause on one line, without the token."""
    text = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
    return " ".join(redacted(text.replace(token, "hf_***")).split()).rstrip(".") or type(error).__name__
