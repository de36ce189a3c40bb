"""From a YAML file and `section.key=value` words to a `Config`.

In the file, paths are relative to the file; in an override, to the working directory. A run
directory's own run.yaml means that directory, wherever it lies now. Override values parse as YAML.
Every mistake is a `ConfigError` that names the key and, for an unknown one, the nearest that
exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError

from pipeline.config import Config, TargetConfig
from pipeline.config.outcome import StockTree
from pipeline.config.problems import problems
from pipeline.errors import ConfigError
from pipeline.redact import redacted

RUN_FILE = "run.yaml"  # a run directory's own configuration
RUN_MARKS = ("lock", "events.jsonl", "latest")  # beside it, once somebody has run it

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


def load_config(file: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Read a configuration file, apply overrides, validate.

    Raises:
        ConfigError: The file or an override cannot be read, or a key or value is wrong.
    """
    path = Path(file).expanduser()
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            "There is no such configuration file.",
            str(file),
            "Name a YAML file, such as one of configs/.",
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"The configuration cannot be read: {error}",
            str(file),
            "It must be a YAML file of sections.",
        ) from None
    if not isinstance(settings, dict):
        raise ConfigError(
            "The configuration is not a mapping of sections.",
            str(file),
            "See configs/demo.yaml for one.",
        )
    beside = (
        path.parent.resolve()
    )  # of a link too: a run's own file means this run, wherever its text lies
    is_own = path.name == RUN_FILE and any((beside / mark).exists() for mark in RUN_MARKS)
    settings = _resolve(settings, beside if is_own else path.resolve().parent)
    if is_own:
        _place_in(settings, beside)
    for word in overrides:
        _override(settings, word, Path.cwd())
    return validate(settings, str(file))


def target_settings(words: Iterable[str]) -> dict[str, Any]:
    """The keys of `target` that `target.key=value` words set, for commands that read no
    configuration.

    Raises:
        ConfigError: As `load_config` does, or for another section.
    """
    settings: dict[str, Any] = {"target": {}}
    for word in words:
        _override(settings, word, Path.cwd())
        if len(settings) > 1 or "model" in settings["target"]:
            fix = (
                "The model itself has an option of its own (see --help); write target.key=value for"
                " its settings."
            )
            raise ConfigError(
                f"Only settings of the target are read here, and not '{word}'.", "command line", fix
            )
    found: dict[str, Any] = settings["target"]
    try:
        TargetConfig.model_validate({"model": "any"} | found)
    except ValidationError as error:
        wrong = problems([{**each, "loc": ("target", *each["loc"])} for each in error.errors()])
        fix = "docs/configuration.md lists the keys of target."
        raise ConfigError(
            f"The settings are wrong: {'; '.join(wrong)}.", "command line", fix
        ) from None
    return found


def _place_in(settings: dict[str, Any], run: Path) -> None:
    """Make a run directory's own file mean that directory, also one that was copied, and the store
    that it links to.
    """
    place = settings.setdefault("run", {})
    if isinstance(place, dict):
        store = linked_store(run)
        place |= {"root": str(run.parent), "name": run.name}
        if store is not None:
            place["store"] = str(store) if store != run else None


def linked_store(run: Path) -> Path | None:
    """Where most of the stages lie that a run directory links to; None where it links to none."""
    stores: Counter[Path] = Counter()
    for link in sorted((run / "latest").glob("[!.]*")):
        if link.is_symlink() and link.is_dir():
            stores[link.resolve().parent] += 1
    return stores.most_common(1)[0][0] if stores else None


def validate(settings: dict[str, Any], where: str) -> Config:
    """A `Config` from plain data; every problem in it is named in one `ConfigError`."""
    try:
        config = Config.model_validate(settings)
    except ValidationError as error:
        fix = "docs/configuration.md lists every key."
        raise ConfigError(
            f"The configuration is wrong: {'; '.join(problems(error.errors()))}.", where, fix
        ) from None
    if key := _secret(config.model_dump(mode="json")):
        what = f"{key} holds a token or a password, and every setting is written to run.yaml."
        raise ConfigError(
            what,
            where,
            "Keep it in the environment, as HF_TOKEN, or in what `hf auth login` stores.",
        )
    return config


def _secret(settings: Any, key: str = "") -> str | None:
    """The first key whose text holds a secret."""
    if isinstance(settings, dict):
        return next(
            (
                found
                for name, value in settings.items()
                if (found := _secret(value, f"{key}.{name}"))
            ),
            None,
        )
    if isinstance(settings, list):
        return next((found for value in settings if (found := _secret(value, key))), None)
    return key.lstrip(".") if isinstance(settings, str) and redacted(settings) != settings else None


def dump_config(config: Config) -> str:
    """The resolved configuration as YAML that gives the same run again, from any working
    directory.
    """
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _override(settings: dict[str, Any], word: str, base: Path) -> None:
    key, equals, text = word.partition("=")
    names = tuple(key.split("."))
    if not equals or len(names) < 2 or not all(names):
        raise ConfigError(
            f"'{word}' is not an override.",
            "command line",
            "Write section.key=value, such as train.lr=1e-3.",
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"The value of {key} is not YAML: {error}.", "command line", "Quote it."
        ) from None
    value = _resolve_value(names, value, base)
    node = settings
    for name in names[:-1]:
        if node.get(name) is None:
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            raise ConfigError(
                f"{key} reaches into a value that has no keys.",
                "command line",
                "Set the whole section's key instead.",
            )
    node[names[-1]] = value


def _resolve(settings: dict[str, Any], base: Path) -> dict[str, Any]:
    """Make every path absolute (against `base`) and read a chat template named by its path."""
    return {
        section: (
            {key: _resolve_value((section, key), value, base) for key, value in keys.items()}
            if isinstance(keys, dict)
            else keys
        )
        for section, keys in settings.items()
    }


def _resolve_value(key: tuple[str, ...], value: Any, base: Path) -> Any:
    if key == ("seeds", "sources"):
        sources = [value] if isinstance(value, str) else value
        return (
            [_resolve_source(each, base) for each in sources]
            if isinstance(sources, list)
            else value
        )
    if not isinstance(value, str):
        return value
    if key == ("calibrate", "choices") and value in get_args(StockTree):
        return value
    if key in PATH_KEYS or (key in PATH_OR_NAME_KEYS and _is_path(value, base)):
        value = _absolute(value, base)
    return (
        _read_template(value) if key == ("target", "chat_template") and "{" not in value else value
    )


def _resolve_source(source: Any, base: Path) -> Any:
    source = {"path": source} if isinstance(source, str) else source
    if isinstance(source, dict) and isinstance(source.get("path"), str):
        return source | {"path": _absolute(source["path"], base)}
    return source


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The chat template cannot be read: {error}.",
            "target.chat_template",
            "Give a Jinja file or the template's text.",
        ) from None


def _absolute(value: str, base: Path) -> str:
    return str((base / Path(value).expanduser()).resolve())


def _is_path(value: str, base: Path) -> bool:
    if value.startswith((".", "/", "~")):
        return True
    return len(value) < 4096 and "\n" not in value and (base / value).exists()
