"""A target's files: a local directory, or a Hub repository at one commit.

The Hub's errors become ConfigError for a target that does not exist and EnvironmentFault for one
that cannot be reached now. Weights are read from safetensors; where a repository has none (Vicuna),
`*.bin` is read by torch's weights-only loader, which runs no code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets import hub_access

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
FIRST_LOOK = 10.0  # seconds that the Hub has to answer, where it is asked once
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
WEIGHT_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SINGLE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def is_local(model: str) -> bool:
    """Whether `model` is a directory: it exists as one, or it cannot be a Hub id."""
    return (
        Path(model).expanduser().is_dir()
        or model.startswith(("/", "./", "../", "~"))
        or model.count("/") > 1
    )


def local_directory(model: str) -> Path:
    """The directory of a local target, absolute.

    Raises:
        ConfigError: There is none, or it holds no config.json.
    """
    directory = Path(model).expanduser().resolve()
    if not directory.is_dir():
        what = "is no directory" if directory.exists() else "does not exist"
        made = " `make demo` makes the demo's." if directory.name.startswith("demo-target") else ""
        raise ConfigError(
            f"The target {model} {what}.", WHERE, f"Give a model directory or a Hub id.{made}"
        )
    if not (directory / "config.json").is_file():
        gguf = next(directory.glob("*.gguf"), None)
        found = f"only {gguf.name}, and GGUF is not read here" if gguf else "no config.json"
        fix = "Give a directory that `save_pretrained` has written."
        raise ConfigError(f"The target directory {model} holds {found}.", WHERE, fix)
    return directory


def has_weights(model: str) -> bool:
    """Whether a local target's directory holds weights, whole or not; ConfigError where there is no
    such target.
    """
    directory = local_directory(model)
    return any((directory / name).is_file() for name in (*SINGLE_WEIGHTS, *WEIGHT_INDEXES))


def find_file(model: str, revision: str | None, name: str) -> Path | None:
    """The path of one file of the target, downloaded if needed; None where the target has no such
    file.
    """
    if is_local(model):
        path = local_directory(model) / name
        return path if path.is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with hub_errors(model, revision):
        try:
            return Path(hf_hub_download(model, name, revision=revision))
        except LocalEntryNotFoundError:
            snapshot = _cached_snapshot(model, revision)
            if snapshot is None or name == "config.json":
                raise
            return None  # offline: only the cached snapshot exists
        except EntryNotFoundError:
            return None


def read_json(model: str, revision: str | None, name: str) -> dict[str, Any]:
    """One of the target's JSON files as a dictionary; empty where the target has no such file."""
    path = find_file(model, revision, name)
    return {} if path is None else parse(path)


def parse(path: Path) -> dict[str, Any]:
    """A file's JSON object; ConfigError where it holds anything else."""
    fix = "Download or save the target again."
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}.", WHERE, fix) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object.", WHERE, fix)
    return found


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor, by name, of a checkpoint in several files.

    Raises:
        ConfigError: It is no such index, or names files outside of the target.
    """
    found = parse(path).get("weight_map")
    index = found if isinstance(found, dict) else {}
    inside = (
        isinstance(name, str) and ".." not in name and not name.startswith("/")
        for name in index.values()
    )
    if not index or not all(inside):
        fix = "Download or save the target again."
        raise ConfigError(
            f"{path} does not say which file of the target holds which tensor.", WHERE, fix
        )
    return index


def identifying_files(
    model: str, revision: str | None, *, with_code: bool, fetch: bool = True
) -> list[Path]:
    """The files that `weight_files` of spec.py promises, `with_code` also the repository's Python
    files.
    """
    if is_local(model):
        directory = local_directory(model)
    elif fetch:
        directory = _download(model, revision, with_code=with_code)
    else:
        directory = _downloaded(model, revision)
    code = sorted(path.name for path in directory.glob("*.py")) if with_code else []
    names = {*DESCRIBING_FILES, *code, *_weight_names(directory, model)}
    return [path for name in sorted(names) if (path := directory / name).is_file()]


def _weight_names(directory: Path, model: str) -> list[str]:
    """Names of the weight files that transformers and vLLM would load: an index's shards, else the
    single file.
    """
    for single, index in zip(SINGLE_WEIGHTS, WEIGHT_INDEXES, strict=True):
        if (directory / single).is_file():
            return [single]
        if (directory / index).is_file():
            shards = sorted(set(read_index(directory / index).values()))
            missing = [shard for shard in shards if not (directory / shard).is_file()]
            if missing:
                what = (
                    f"The target {model} lacks {len(missing)} of {len(shards)} weight files,"
                    f" {missing[0]} first."
                )
                raise ConfigError(what, WHERE, "Download it again.")
            return [index, *shards]
    kinds = {path.suffix for path in directory.iterdir()} & {".gguf", ".pt", ".pth", ".safetensors"}
    what = (
        f"The target {model} has no"
        f" model.safetensors{f', only {min(kinds)} files' if kinds else ''}."
    )
    fix = (
        "Load it once where it came from and `save_pretrained` it to a directory, then name that"
        " directory."
    )
    raise ConfigError(what, WHERE, fix)


def _download(model: str, revision: str | None, *, with_code: bool) -> Path:
    from huggingface_hub import snapshot_download

    has_safetensors = any(
        find_file(model, revision, name) for name in ("model.safetensors", WEIGHT_INDEXES[0])
    )
    weights = "model*.safetensors*" if has_safetensors else "pytorch_model*.bin*"
    patterns = [*DESCRIBING_FILES, weights, *(["*.py"] if with_code else [])]
    with hub_errors(model, revision):
        return Path(snapshot_download(model, revision=revision, allow_patterns=patterns))


def _downloaded(model: str, revision: str | None) -> Path:
    """The directory of an earlier `_download`."""
    snapshot = _cached_snapshot(model, revision)
    try:
        if snapshot is not None and _weight_names(snapshot, model):
            return snapshot
    except ConfigError:  # the download is incomplete
        pass
    what = f"The target {model} is not on this machine yet; a run downloads it."
    raise EnvironmentFault(what, WHERE, "Run it, or download the target first.")


def _cached_snapshot(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model, "config.json", revision=revision)
    return Path(cached).parent if isinstance(cached, str) else None


def hub_errors(model: str, revision: str | None) -> AbstractContextManager[None]:
    """Translate the Hub client's errors about a target."""
    at = f" at revision {revision}" if revision else ""
    return hub_access.hub_errors(f"target {model}{at}", WHERE)


@contextmanager
def one_look_at_the_hub(*models: str | None) -> Iterator[None]:
    """Within it a Hub that does not answer now is not asked again: what is not cached is refused
    without waiting.

    The Hub's client tries six times at every file. Nobody asks where every model is a directory or
    None.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    if not before and not all(model is None or is_local(model) for model in models):
        try:
            model = next(model for model in models if model and not is_local(model))
            get_session().head(
                f"{constants.ENDPOINT}/api/models/{model}", timeout=FIRST_LOOK
            )  # whatever it answers
        except Exception:  # no network, no such host, an endpoint that is no URL
            constants.HF_HUB_OFFLINE = True  # which it reads at each request
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
