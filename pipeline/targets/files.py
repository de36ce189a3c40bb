"""Find, download and check a target's files, in a directory or a Hub repository.

The Hub's errors become ConfigError if a repository does not exist, and EnvironmentFault if the Hub
cannot be reached. Weights are read from safetensors. If a repository has none (Vicuna), `*.bin` is
read by torch's weights-only loader, which runs no code.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, EnvironmentFault, MedusaDistillError
from pipeline.redact import redacted

WHERE = "target.model"
DESCRIBING_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
# all weights in one file, or the index of several files
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER = "adapter_config.json"
FETCH_AGAIN = "Download or save the target again."
NETWORK = "Check the network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk"


def is_local(model: str) -> bool:
    """Return whether a `target.model` is the path of a local directory rather than a Hub id.

    The directory need not exist.
    """
    if model.startswith(("/", "./", "../", "~")) or model.count("/") > 1:
        return True
    return Path(model).is_dir()


def local_directory(model: str) -> Path:
    """Return the absolute directory of a local target.

    Raises:
        ConfigError: The directory does not exist or has no config.json.
    """
    directory = Path(model).expanduser().resolve()
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"There is no {directory / 'config.json'}.",
            WHERE,
            "Give a directory that `save_pretrained` has written, or a Hub id; `make demo` makes"
            " the demo's.",
        )
    return directory


def find_file(model: str, revision: str | None, name: str) -> Path | None:
    """Return the path of a target's file, downloaded if needed; None if it does not exist.

    Offline, a file counts as missing if it is not cached beside the target's cached config.json.

    Raises:
        ConfigError: There is no such target.
        EnvironmentFault: The Hub cannot be reached, and the target is not in the cache.
    """
    if is_local(model):
        path = local_directory(model) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with target_errors(model, revision):
        try:
            return Path(hf_hub_download(model, name, revision=revision))
        except LocalEntryNotFoundError:
            if name == "config.json" or cached_snapshot(model, revision) is None:
                raise
            return None  # offline, and the cached snapshot does not have it
        except EntryNotFoundError:
            return None


def download(model: str, revision: str | None, *, with_code: bool) -> Path:
    """Download a Hub target's weights, configuration and tokenizer; return the directory.

    With `with_code`, Python files are downloaded too. Errors are those of `find_file`.
    """
    from huggingface_hub import snapshot_download

    weights = "pytorch_model*.bin*"
    for name in SAFETENSORS:
        if find_file(model, revision, name) is not None:
            weights = "model*.safetensors*"
    patterns = [*DESCRIBING_FILES, weights]
    if with_code:
        patterns.append("*.py")
    with target_errors(model, revision):
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))


def cached_snapshot(model: str, revision: str | None) -> Path | None:
    """Return a target's directory in the Hub's cache; None if its config.json is not cached."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def weight_names(directory: Path) -> list[str]:
    """Return the names of the weight files in a directory: one file, or an index and its shards.

    Raises:
        ConfigError: There are no weight files, shards are missing, or the index is damaged.
    """
    for single, index in (SAFETENSORS, PICKLES):
        if (directory / single).is_file():
            return [single]
        if (directory / index).is_file():
            shards = sorted(set(read_index(directory / index).values()))
            for shard in shards:
                if not (directory / shard).is_file():
                    raise ConfigError(
                        f"{directory} lacks {shard} of its {len(shards)} weight files.",
                        WHERE,
                        FETCH_AGAIN,
                    )
            return [index, *shards]
    raise ConfigError(
        f"{directory} has no model.safetensors.",
        WHERE,
        "Load the model with its own library, call `save_pretrained`, and use the saved directory.",
    )


def require_no_other_weights(model: str, revision: str | None) -> None:
    """Check that every engine reads the weights of a target that `weight_names` returns.

    transformers also applies an adapter beside the weights. vLLM reads the files of the index, or
    every safetensors file of a directory without one.

    Raises:
        ConfigError: There is an adapter, or a safetensors file that only vLLM would read.
        EnvironmentFault: The Hub cannot be reached.
    """
    extra: set[str] = set()
    single, index = SAFETENSORS
    if find_file(model, revision, ADAPTER) is not None:
        extra = {ADAPTER}
    elif is_local(model) and find_file(model, revision, single) is not None:
        directory = local_directory(model)
        read_by_vllm = {path.name for path in directory.glob("*.safetensors")}
        if (directory / index).is_file():
            read_by_vllm = set(read_index(directory / index).values())
        extra = read_by_vllm - {single}
    if extra:
        names = ", ".join(sorted(extra))
        raise ConfigError(
            f"{model} holds other weights beside the target's, which some engines would load.",
            WHERE,
            f"Move {names} and what belongs to it out of the directory; merge an adapter that is"
            " not yet in the weights (`merge_and_unload` of peft) first.",
        )


def parse_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a target's file.

    Raises:
        ConfigError: The file holds anything else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.", WHERE, FETCH_AGAIN) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object.", WHERE, FETCH_AGAIN)
    return found


def read_index(path: Path) -> dict[str, str]:
    """Read the index of a sharded target: the weight file of each tensor, by tensor name.

    Raises:
        ConfigError: The file is no such index.
    """
    index = parse_json_object(path).get("weight_map", {})
    if not index:
        raise ConfigError(
            f"{path} does not state which file of the target holds which tensor.",
            WHERE,
            FETCH_AGAIN,
        )
    return index


def check_repo_id(repo_id: str, where: str, *, with_owner: bool = False) -> None:
    """Raise ConfigError if a text is not a valid repository id of the Hub.

    Args:
        where: The configuration key in the error.
        with_owner: Whether the id must have the form USER/NAME.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    fix = "Write a Hub id as USER/NAME."
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(
            f'"{repo_id}" is neither a Hub id nor an absolute path.',
            where,
            fix,
        ) from error
    if with_owner and "/" not in repo_id:
        raise ConfigError(
            f'"{repo_id}" does not name the owner of the repository.',
            where,
            fix,
        )


@contextmanager
def target_errors(model: str, revision: str | None) -> Iterator[None]:
    """Context manager that converts errors of reading a target, as `hub_errors` does."""
    at = f" at revision {revision}" if revision else ""
    with hub_errors(f"target {model}{at}", WHERE):
        yield


@contextmanager
def hub_errors(subject: str, where: str, *, writes: bool = False) -> Iterator[None]:
    """Context manager that converts errors of a read from the Hub or an upload to it.

    The warnings of the Hub client's HTTP logger are turned off, and stay off.

    Args:
        subject: The repository in the error, such as `target owner/name`.
        where: The configuration key or the repository.
        writes: Whether files are uploaded. If so, RuntimeError and ValueError are translated too,
            because the client raises them for failed uploads.

    Raises:
        ConfigError: On a read, the repository or revision does not exist or is gated, or its id is
            invalid.
        EnvironmentFault: A read failed for another reason, or an upload failed. The message does
            not contain the Hub token of the user.
    """
    from huggingface_hub import errors as hub

    logging.getLogger("huggingface_hub.utils._http").setLevel(logging.ERROR)
    translated: list[type[Exception]] = [OSError, hub.HTTPError, hub.HFValidationError]
    if writes:
        translated += [RuntimeError, ValueError]
    try:
        yield
    except MedusaDistillError:
        raise
    except tuple(translated) as error:
        if writes:
            raise _hub_write_error(error, subject, where) from None  # its cause may quote the token
        raise _hub_read_error(error, subject, where) from error


def _hub_read_error(error: Exception, subject: str, where: str) -> MedusaDistillError:
    """Return the error to raise for a failed read from the Hub.

    It is a ConfigError if the repository or revision is missing or gated, or if its id is invalid;
    else an EnvironmentFault.
    """
    from huggingface_hub import errors as hub

    missing = (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.HFValidationError)
    if isinstance(error, missing):
        return ConfigError(
            f"There is no {subject} that you may read, as a directory or on the Hub.",
            where,
            "Check the spelling. A private or gated one needs `hf auth login` and, on its Hub page,"
            " your agreement to its terms; a directory begins with ./ or /.",
        )
    return EnvironmentFault(
        f"The {subject} can be neither read nor fetched now ({type(error).__name__}).",
        where,
        f"{NETWORK}, or give a local directory.",
    )


def _hub_write_error(error: Exception, subject: str, where: str) -> EnvironmentFault:
    """Return the error to raise for a failed upload to the Hub; its message has no token in it."""
    from huggingface_hub import get_token

    text = f"{error!r} ({error.__cause__})"
    token = get_token()
    if token:
        text = text.replace(token, "hf_***")
    return EnvironmentFault(
        f"The {subject} cannot be written now: {' '.join(redacted(text).split())}.",
        where,
        f"{NETWORK}, log in with a token that may write there (`hf auth login`, HF_TOKEN), and run"
        " the same command again: uploaded files are not sent twice.",
    )
