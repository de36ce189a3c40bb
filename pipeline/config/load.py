"""Load a `Config` from a YAML file and `section.key=value` overrides.

Paths in the file are relative to the file's directory; paths in an override are relative to the
working directory. Override values parse as YAML. The run.yaml of a run directory refers to the
directory that it is in, even if that was moved or copied.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import mode
from typing import Any

import yaml
from pydantic import ValidationError

from pipeline.config import Config, TargetConfig
from pipeline.config.reference import key_rows
from pipeline.config.running import PlainData
from pipeline.errors import ConfigError
from pipeline.redact import redacted

BUNDLED = Path(__file__).parents[1] / "bundled" / "configs"
RUN_FILE = "run.yaml"  # a run directory's own configuration
RUN_MARKS = ("lock", "events.jsonl", "latest")  # beside it, once it was run

PATH_KEYS = {
    ("run", "root"),
    ("run", "store"),
    ("calibrate", "choices"),
    ("calibrate", "data"),
    ("check", "prompts"),
}
PATH_OR_NAME_KEYS = {
    ("target", "model"),
    ("target", "chat_template"),
    ("check", "assistant_model"),
    ("check", "served_model"),
}
# Parts of an error's location that pydantic adds for the members of a union, and for dict keys.
ALTERNATIVES = ("int", "float", "string", "path", "tuple", "[key]")
PREFIXES = ("constrained-", "literal[", "tuple[")  # of such parts


def load_config(file: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration file, apply overrides, and validate the result.

    Relative paths are relative to the file's directory; in an override, to the working directory.

    Args:
        file: A YAML file, a run directory, or the name of a bundled file: `zephyr-7b` or
            `zephyr-7b.yaml`.
        overrides: Settings that replace the file's settings, each as `section.key=value`.

    Raises:
        ConfigError: The file, a chat template or an override cannot be read, a key or value is
            wrong, or a setting holds a token or a password.
    """
    path = _file_of(file)
    try:
        with path.open("rb") as opened:
            settings = yaml.safe_load(opened)
    except FileNotFoundError:
        names = ", ".join(sorted(bundled.stem for bundled in BUNDLED.glob("*.yaml")))
        raise ConfigError(
            "There is no such configuration file.", file, f"Pass a YAML file, or one of {names}."
        ) from None
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(
            f"The configuration cannot be read: {error}",
            file,
            "The file must be YAML with sections.",
        ) from None
    if not isinstance(settings, dict):
        raise ConfigError(
            "The configuration is not a mapping of sections.",
            file,
            "configs/demo.yaml is an example.",
        )
    # A symlink named run.yaml belongs to the run directory that contains the link.
    beside = path.parent.resolve()
    is_own = path.name == RUN_FILE and any((beside / mark).exists() for mark in RUN_MARKS)
    base = beside if is_own else path.resolve().parent
    for section, keys in settings.items():
        if isinstance(keys, dict):
            for key, value in keys.items():
                keys[key] = _resolved((section, key), value, base)
    if is_own:
        _place_in(settings, beside)
    where = str(file)
    for word in overrides:
        where += f", {_override(settings, word)}"
    return validate(settings, where)


def _file_of(file: str | Path) -> Path:
    """Return the path of a configuration file, of a run directory's, or of a bundled one."""
    path = Path(file).expanduser()
    own = path / RUN_FILE
    if own.is_file():
        return own
    if path.is_file() or len(path.parts) > 1:
        return path
    return BUNDLED / f"{path.name.removesuffix('.yaml')}.yaml"


def target_settings(words: Iterable[str], options: Container[str] = ()) -> PlainData:
    """Parse and validate `target.key=value` overrides.

    Args:
        words: The overrides.
        options: The names of the command's own options, which the error for another key suggests.

    Returns:
        The given settings of the section `target`, without defaults.

    Raises:
        ConfigError: A word is no override or sets `target.model` or another section, a key or value
            is wrong, or a chat template cannot be read.
    """
    settings: PlainData = {"target": {}}
    for word in words:
        _override(settings, word)
        if len(settings) > 1 or "model" in settings["target"]:
            key, _, value = word.partition("=")
            name = key.rpartition(".")[2]
            fix = "Write target.KEY=VALUE; the model and all else have options (see --help)."
            if name in options:
                fix = f"Use --{name.replace('_', '-')} {value}."
            raise ConfigError(f"This command does not accept '{word}'.", "command line", fix)
    found = settings["target"]
    try:
        TargetConfig.model_validate({"model": "any"} | found)
    except ValidationError as error:
        wrong = problems([{**each, "loc": ("target", *each["loc"])} for each in error.errors()])
        raise ConfigError(
            f"The settings are wrong: {'; '.join(wrong)}.",
            "command line",
            "docs/configuration.md lists the keys of target.",
        ) from None
    return found


def validate(settings: PlainData, where: str | Path) -> Config:
    """Validate plain data as a `Config`.

    Args:
        where: The file or other source of the settings, for errors.

    Raises:
        ConfigError: A key or value is wrong, or a setting holds a token or a password. The error
            names all wrong keys.
    """
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(
            f"The configuration is wrong: {'; '.join(problems(error.errors()))}.",
            where,
            "docs/configuration.md lists every key.",
        ) from None
    for key, text in _texts(config.model_dump(mode="json")):
        if redacted(text) != text:
            raise ConfigError(
                f"{key} holds a token or a password, and every setting is written to run.yaml.",
                where,
                "Set it in the environment, as HF_TOKEN, or store it with `hf auth login`.",
            )
    return config


def _texts(settings: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key and the value of every string in a configuration's nested settings."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield from _texts(value, f"{key}.{name}".lstrip("."))
    elif isinstance(settings, list):
        for value in settings:
            yield from _texts(value, key)
    elif isinstance(settings, str):
        yield key, settings


def dump_config(config: Config) -> str:
    """Return a configuration as the YAML text of run.yaml."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _place_in(settings: PlainData, run: Path) -> None:
    """Set run.root and run.name in the settings of a run.yaml to its run directory's location.

    Also sets run.store, if links in `latest` lead to stage directories.
    """
    place = settings.setdefault("run", {})
    if isinstance(place, dict):
        place.update(root=str(run.parent), name=run.name)
        store = _store_of_run_file(run)
        if store is not None:
            place["store"] = None if store == run else str(store)


def _store_of_run_file(run: Path) -> Path | None:
    """Return the directory that most links in a run's `latest` lead into; None without links."""
    stores = []
    for link in sorted((run / "latest").glob("[!.]*")):
        if link.is_symlink() and link.is_dir():
            stores.append(link.resolve().parent)
    return mode(stores) if stores else None


def _override(settings: PlainData, word: str) -> str:
    """Apply a `section.key=value` override to the settings, in place; return its key.

    Raises:
        ConfigError: The word is no override, its value is not YAML, the key is below a value that
            has no keys, or a chat template cannot be read.
    """
    key, equals, text = word.partition("=")
    names, where = tuple(key.split(".")), "command line"
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(
            f"'{word}' is not an override.",
            where,
            "Write section.key=value, such as train.lr=1e-3.",
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"The value of {key} is not YAML: {error}.", where, "Quote it.") from None
    node = settings
    for name in names[:-1]:
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            raise ConfigError(
                f"A part of {key} is a value, not a section.",
                where,
                "Set a key of a section.",
            )
    node[names[-1]] = _resolved(names, value, Path.cwd())
    return key


def _resolved(key: tuple[str, ...], value: Any, base: Path) -> Any:
    """Return a configuration value with its paths, which are relative to `base`, made absolute.

    The path of a chat template is replaced by the template's text.
    """
    if key == ("seeds", "sources"):
        sources = [value] if isinstance(value, str) else value
        if isinstance(sources, list):
            return [_resolved_source(source, base) for source in sources]
    if not isinstance(value, str):
        return value
    if key in PATH_KEYS or (key in PATH_OR_NAME_KEYS and _is_path(value, base)):
        value = _absolute(value, base)
    if key == ("target", "chat_template") and "{" not in value:
        return _read_template(value)
    return value


def _resolved_source(source: Any, base: Path) -> Any:
    """Return a configured seed source with an absolute path; a string is the source's path."""
    if isinstance(source, str):
        source = {"path": source}
    if isinstance(source, dict) and isinstance(source.get("path"), str):
        return {**source, "path": _absolute(source["path"], base)}
    return source


def _read_template(path: str) -> str:
    """Read the chat template file in `target.chat_template`; raise ConfigError if unreadable."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The chat template cannot be read: {error}.",
            "target.chat_template",
            "Give a Jinja file or the template's text.",
        ) from None


def _absolute(value: str, base: Path) -> str:
    """Make a configured path absolute; it may begin with `~` or be relative to `base`."""
    return str((base / Path(value).expanduser()).resolve())


def _is_path(value: str, base: Path) -> bool:
    """Return whether a setting is a local path, and not a Hub id or the text of a template."""
    return value.startswith((".", "/", "~")) or os.path.exists(base / value)


def problems(errors: Sequence[Any]) -> list[str]:
    """Return one message per wrong configuration key, given `ValidationError.errors()`.

    If a key allows several types, such as a number or `auto`, pydantic reports a wrong value once
    per type. These reports are joined.
    """
    by_key: dict[str, list[Any]] = {}
    for error in errors:
        parts = []
        for part in map(str, error["loc"]):
            if part not in ALTERNATIVES and not part.startswith(PREFIXES):
                parts.append(part)
        by_key.setdefault(".".join(parts), []).append(error)
    return [_problem(key, found) for key, found in by_key.items()]


def _problem(key: str, errors: list[Any]) -> str:
    """Return the message for a configuration key that is unknown, missing or wrong."""
    first = errors[0]
    kind = first["type"]
    if kind == "extra_forbidden":
        near = nearest_key(key)
        hint = f"; did you mean '{near}'?" if near else ""
        return f"there is no key '{key}'{hint}"
    if kind == "missing":
        return f"'{key}' is needed"
    messages = []
    for error in errors:
        message = (
            error["msg"]
            .removeprefix("Value error, ")
            .replace("Input should", "it must")
            .replace("a valid tuple", "a list, such as [a, b]")
        )
        if message not in messages:
            messages.append(message)
    wanted = " or ".join(messages)
    if kind == "value_error":
        return f"'{key}': {wanted}"
    value = json.dumps(first["input"], ensure_ascii=False, default=str)
    problem = f"'{key}': {wanted}, not {value[:80]}"
    is_text = kind in ("string_type", "path_type")
    if is_text and not isinstance(first["input"], list | dict):
        problem += (
            "; YAML does not read yes, no, on, off, null, numbers and dates as text:"
            f""" quote them, on the command line as {key}='"TEXT"'"""
        )
    return problem


def nearest_key(wrong: str) -> str | None:
    """Return the configuration key that is most similar to an unknown one; None if none is."""
    keys = [*Config.model_fields, *(key.replace("[]", "") for key, _ in key_rows(Config))]
    near = difflib.get_close_matches(wrong, keys, n=1, cutoff=0.7)
    return near[0] if near else None
