"""Files of heads that were not made here: a directory or a repository of the Hub, in safetensors or
in a pickle of plain tensors, which is read without running its code."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from torch import Tensor

from pipeline.errors import ConfigError, DataError
from pipeline.export.layout import CONFIG_FILE
from pipeline.export.weights import WEIGHT_SUFFIXES, WeightsFile
from pipeline.heads.foreign_layouts import NOT_HERE, ForeignHeads, Sizes, made_of
from pipeline.heads.kind import TargetWeights
from pipeline.storage.atomic import read_object
from pipeline.targets.files import hub_errors, is_local


def heads_directory(name: str) -> Path:
    """A directory of heads, or what the Hub has under this id, fetched.

    Raises:
        ConfigError: There is neither.
        EnvironmentFault: The Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    if is_local(name):
        if not Path(name).expanduser().is_dir():
            raise ConfigError(
                f"There is no directory {name}.", "check", "Give a directory of heads, or a Hub id."
            )
        return Path(name).expanduser()
    with hub_errors(f"repository of heads {name}", "check"):
        return Path(
            snapshot_download(
                name, allow_patterns=["*.json", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)]
            )
        )


def read_foreign(
    directory: Path, target: TargetWeights, sizes: Sizes, num_tokens: int
) -> ForeignHeads:
    """The heads of a directory, see `made_of`; DataError where there are no tensors at all."""
    return made_of(_Tensors(directory), target, sizes, num_tokens)


class _Tensors:
    """All tensors of a directory's weights, under their names but for `model.`; read when they are
    asked for.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = read_object(directory / CONFIG_FILE)
        weights = [
            path
            for path in sorted(directory.iterdir())
            if path.suffix in WEIGHT_SUFFIXES and path.is_file()
        ]
        safe = [path for path in weights if path.suffix == ".safetensors"]
        if not weights:
            raise DataError("There are no weights here.", str(directory), NOT_HERE)
        self.files: dict[str, tuple[WeightsFile, str]] = {}
        for file in map(WeightsFile, safe or weights):
            self.files |= {name.removeprefix("model."): (file, name) for name in file.shapes}

    @property
    def names(self) -> Collection[str]:
        return self.files.keys()

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self.files[name]
        return file.tensor(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self.files[name]
        return file.shapes[stored]

    def refuse(self, what: str, fix: str = NOT_HERE) -> DataError:
        return DataError(what, str(self.directory), fix)
