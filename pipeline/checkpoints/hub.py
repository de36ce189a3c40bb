"""An export on the Hub: one repository, one commit, never without a passed check, never with a local path.

Pushing again is safe. What the Hub already has is not sent again; when it has everything, no commit is made. Only a
repository that is new, or holds Medusa heads and nothing else that engines would load, is written to.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, ModelInfo, get_token
from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

from pipeline.checkpoints.card import model_card
from pipeline.checkpoints.layout import (
    CARD_FILE,
    CHOICES_FILE,
    CONFIG_FILE,
    WEIGHT_SUFFIXES,
    WEIGHTS_FILE,
    check_repo_id,
    is_local,
    read_config,
)
from pipeline.errors import CheckFailed, ConfigError, DataError, EnvironmentFault, MedusaDistillError
from pipeline.secrecy import redacted

BOOKKEEPING = {"stage.json", "upstream.json", "DONE.json", "lock"}
CONTINUES = "Run the same command again: what has arrived is not sent twice."


def push_export(
    directory: str | Path,
    *,
    repo_id: str,
    report: Mapping[str, Any] | None,
    recipe: Mapping[str, Any],
    private: bool = False,
    base_model: str | None = None,
    token: str | None = None,
    dry_run: bool = False,
    endpoint: str | None = None,
) -> dict[str, Any]:
    """Push an export with a freshly rendered model card, as one commit; return the receipt.

    Args:
        directory: What `write_export` wrote. It is not changed: `config.json` and the card are rewritten on the way.
        repo_id: USER/NAME.
        report: `report.json`; its check must be there and have passed.
        recipe: The run's resolved configuration as plain data, for the card.
        private: Make the repository private; an existing public one is refused, an existing private one stays private.
        base_model: The target's Hub id; needed where the export names a local directory.
        token: A Hub token that may write; default HF_TOKEN or what `hf auth login` stored.
        dry_run: Only list what would go. Touches no network and needs no token.
        endpoint: Another Hub; default HF_ENDPOINT.

    Returns:
        {"repo", "url", "commit", "unchanged", "private", "base_model", "files": [{"path", "size", "sha256"}]};
        of a dry run also "dry_run": True and "missing": what the real push would still want.

    Raises:
        CheckFailed: The check failed or was not run.
        DataError: The directory is not a whole export, or names the target's local path where it should not.
        ConfigError: The ids, or what is already in the repository, forbid it.
        EnvironmentFault: No token, or the Hub could not be reached or refused.
    """
    directory = Path(directory)
    check_repo_id(repo_id, "push.repo_id", with_owner=True)
    report = require_passed_check(report)
    exported = read_config(directory)
    base = base_model or exported.base_model_name_or_path
    missing = []
    if is_local(base):
        missing.append("the Hub id of the target (push.base_model): nobody else can load a local one")
    else:
        check_repo_id(base, "push.base_model")

    card = model_card(report, base_model=base, repo_id=repo_id, recipe=recipe)
    config = json.dumps(replace(exported, base_model_name_or_path=base).to_json(), indent=2) + "\n"
    files: dict[str, Path | bytes] = {name: directory / name for name in _names(directory)}
    files |= {CARD_FILE: card.encode(), CONFIG_FILE: config.encode()}
    additions = [CommitOperationAdd(name, content) for name, content in sorted(files.items())]
    receipt = {"repo": repo_id, "private": private, "base_model": base, "files": [_listed(file) for file in additions]}
    if dry_run:
        return receipt | {"dry_run": True, "commit": None, "missing": missing}
    if missing:
        fix = "Publish the target first, then push with push.base_model=USER/NAME."
        raise ConfigError(f"The push lacks {missing[0]}.", base, fix)
    _refuse_local_path(additions, exported.base_model_name_or_path)
    return receipt | _upload(additions, repo_id, private, _token(token), endpoint)


def require_passed_check(report: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The report, if its check was run and passed; CheckFailed with the reasons if not.

    A check passes when it says so (`check.passed`, where it is given) and its figures agree: every greedy sequence
    identical or parted at a tie, a native acceleration rate of at least 1, drafted tokens accepted in vLLM.
    """
    check = (report or {}).get("check") or {}
    engines = {name: check[name] for name in ("native", "vllm") if check.get(name)}
    if report is None or not engines:
        raise CheckFailed("These heads have not been checked.", "report.json", "Run the check stage, then push.")
    reasons = [str(reason).rstrip(".") for reason in check.get("failures") or ()]
    if check.get("passed") is False and not reasons:
        reasons.append("the check stage says so")
    for name, engine in engines.items():
        match, rate = engine.get("greedy_match") or {}, engine.get("acceleration_rate")
        differing = match.get("sequences", 0) - match.get("identical", 0) - match.get("ties", 0)
        if differing > 0:
            reasons.append(f"{differing} of {match['sequences']} greedy sequences differ from plain decoding in {name}")
        if not isinstance(rate, (int, float)) or not math.isfinite(rate) or rate < 1 or (name == "vllm" and rate == 1):
            reasons.append(f"the acceleration rate in {name} is {rate}")
    if reasons:
        failed = f"The check of these heads failed: {'; '.join(reasons)}."
        raise CheckFailed(failed, "report.json", "Nothing was pushed; the report says more.")
    return report


def _names(directory: Path) -> list[str]:
    """Every file of the export, without the stage's own bookkeeping and whatever is hidden."""
    paths = (path.relative_to(directory) for path in sorted(directory.rglob("*")) if path.is_file())
    paths = (path for path in paths if path.name not in BOOKKEEPING and not any(p.startswith(".") for p in path.parts))
    names = [path.as_posix() for path in paths]
    if gone := {WEIGHTS_FILE, CHOICES_FILE} - set(names):
        raise DataError(f"The export lacks {', '.join(sorted(gone))}.", str(directory), "Export again.")
    if strangers := _other_weights(names):
        fix = "Push them to a repository of their own: engines load every weights file that they find."
        raise DataError(f"Other weights lie beside the heads: {', '.join(strangers)}.", str(directory), fix)
    return names


def _other_weights(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if Path(name).suffix in WEIGHT_SUFFIXES and name != WEIGHTS_FILE)


def _listed(file: CommitOperationAdd) -> dict[str, Any]:
    info = file.upload_info
    return {"path": file.path_in_repo, "size": info.size, "sha256": info.sha256.hex()}


def _refuse_local_path(additions: Iterable[CommitOperationAdd], base: str) -> None:
    """The target's directory may have found its way into a tokenizer's settings; it is nobody else's business."""
    if not is_local(base):
        return
    for addition in additions:
        if addition.path_in_repo == WEIGHTS_FILE:
            continue
        with addition.as_file() as file:
            if base.encode() in file.read():
                fix = "Remove the path from it, then push again."
                raise DataError(f"{addition.path_in_repo} names the target's local path.", base, fix)


def _token(token: str | None) -> str:
    token = token or get_token()
    if not token:
        fix = "Run `hf auth login`, or set HF_TOKEN to a token that may write; then push again."
        raise EnvironmentFault("There is no Hub token.", "push", fix)
    return token


def _upload(
    additions: list[CommitOperationAdd], repo_id: str, private: bool, token: str, endpoint: str | None
) -> dict[str, Any]:
    api = HfApi(endpoint=endpoint, token=token, library_name="medusa-distill")
    with _hub_faults(repo_id, token):
        existing = _existing(api, repo_id)
        if existing is None:
            api.create_repo(repo_id, private=private, exist_ok=True)
        else:
            _require_heads_repository(existing, repo_id, private)
        commit = api.create_commit(repo_id, additions, commit_message="Medusa heads")
    return {
        "url": redacted(f"{api.endpoint}/{repo_id}"),
        "commit": commit.oid,
        "unchanged": existing is not None and existing.sha == commit.oid,
        "private": private if existing is None else bool(existing.private),
    }


def _existing(api: HfApi, repo_id: str) -> ModelInfo | None:
    try:
        return api.model_info(repo_id)
    except HfHubHTTPError as error:
        if error.response.status_code == 404 or error.response.headers.get("X-Error-Code") == "RepoNotFound":
            return None
        raise


def _require_heads_repository(existing: ModelInfo, repo_id: str, private: bool) -> None:
    """Refuse to publish what should stay private, and to write over something that is not a set of heads."""
    if private and not existing.private:
        fix = "Make it private on the Hub, or push with push.private=false."
        raise ConfigError("The repository is public, and push.private asks for a private one.", repo_id, fix)
    names = {sibling.rfilename for sibling in existing.siblings or ()}
    strangers = _other_weights(names) or ([CONFIG_FILE] if CONFIG_FILE in names and WEIGHTS_FILE not in names else [])
    if strangers:
        fix = "Push the heads to a repository of their own: engines load every weights file that they find."
        raise ConfigError(f"The repository holds something else ({', '.join(strangers[:3])}).", repo_id, fix)


@contextlib.contextmanager
def _hub_faults(repo_id: str, token: str) -> Iterator[None]:
    """Say what went wrong between this machine and the Hub; the token is never part of it."""
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
    """An error, and what it came from, on one line and without the token."""
    text = f"{error} ({error.__cause__})" if error.__cause__ else str(error)
    return " ".join(redacted(text.replace(token, "hf_***")).split()).rstrip(".") or type(error).__name__
