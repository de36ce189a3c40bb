"""Read and write weights files of heads: safetensors; pickles of plain tensors are only read.

Pickles are read with `weights_only=True`, which runs none of their code. Safetensors files are
written without copies of the tensors. A tensor with several names is stored once per name in the
file, but only once in memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from pipeline.errors import ConfigError, DataError
from pipeline.export.layout import CONFIG_FILE
from pipeline.heads.foreign import NOT_HERE
from pipeline.storage.atomic import read_object
from pipeline.targets.files import hub_errors, is_local
from pipeline.targets.spec import one_line

PICKLES = (".pt", ".pth", ".bin")
WEIGHT_SUFFIXES = (".safetensors", *PICKLES, ".ckpt", ".gguf")  # files that engines load
DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float64",
    "I64": "int64",
    "BOOL": "bool",
}  # torch's names of safetensors' dtypes


class WeightsFile:
    """An open weights file of exported heads; its tensors are read on demand.

    Attributes:
        shapes: The shape of each tensor, by name.
        dtypes: Torch's name of each tensor's dtype, by name.
    """

    def __init__(self, path: Path):
        """Open a weights file of heads; raise DataError if it is damaged or holds other objects."""
        self._pickled: dict[str, Tensor] | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        if path.suffix in PICKLES:
            self._pickled = _plain_tensors(path)
            for name, tensor in self._pickled.items():
                self.shapes[name] = tuple(tensor.shape)
                self.dtypes[name] = str(tensor.dtype).removeprefix("torch.")
            return
        try:
            self._file = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise DataError(
                f"The weights cannot be read: {error}.",
                path,
                "Export again, or fetch the file again.",
            ) from error
        for name in self._file.offset_keys():
            part = self._file.get_slice(name)
            self.shapes[name] = tuple(part.get_shape())
            self.dtypes[name] = DTYPES.get(part.get_dtype(), part.get_dtype())

    def tensor(self, name: str) -> Tensor:
        """Read a tensor of exported heads by its name in the weights file."""
        if self._pickled is not None:
            return self._pickled[name]
        return self._file.get_tensor(name)


def write_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous CPU tensors to a safetensors file.

    Raises:
        OSError, SafetensorError: The file cannot be written, for example on a full disk.
    """
    # `safetensors.torch.save_file` refuses tensors that share memory, and copies need more memory.
    specs = {}
    for name, tensor in tensors.items():
        specs[name] = TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
    serialize_file(specs, path, metadata={"format": "pt"})


def _plain_tensors(path: Path) -> dict[str, Tensor]:
    """Read an export's pickle of named tensors; raise DataError for damage and other objects."""
    fix = "If you trust it, convert it to safetensors. Otherwise fetch the file again."
    try:
        with warnings.catch_warnings(action="ignore"):  # warns of pickle protocols
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch raise errors of their own
        raise DataError(
            f"The file holds more than plain tensors, and no code runs: {one_line(error)}.",
            path,
            fix,
        ) from error
    is_named = isinstance(content, dict) and all(isinstance(name, str) for name in content)
    if not is_named or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise DataError("The file does not hold named tensors.", path, fix)
    return dict(content)


class DirectoryTensors:
    """The tensors of a directory of exported heads, by name without the prefix `model.`.

    Tensors are read on demand. Pickles are read only if there is no safetensors file.

    Raises:
        DataError: The directory holds no weights, or a weights file or config.json cannot be read.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = read_object(directory / CONFIG_FILE)
        weights = [path for path in sorted(directory.iterdir()) if path.suffix in WEIGHT_SUFFIXES]
        safe = [path for path in weights if path.suffix == ".safetensors"]
        if not weights:
            raise DataError("The directory has no weights.", directory, NOT_HERE)
        self._files: dict[str, tuple[WeightsFile, str]] = {}
        for path in safe or weights:
            file = WeightsFile(path)
            for name in file.shapes:
                self._files[name.removeprefix("model.")] = (file, name)

    @property
    def names(self) -> Collection[str]:
        """The names of the tensors in a directory of exported heads."""
        return self._files.keys()

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self._files[name]
        return file.tensor(stored)

    def refuse(self, what: str, fix: str = NOT_HERE) -> DataError:
        """Return a DataError about this directory of exported heads, for the caller to raise."""
        return DataError(what, self.directory, fix)


def heads_directory(name: str) -> Path:
    """Return the local directory of exported heads, downloaded first if `name` is a Hub id.

    Raises:
        ConfigError: There is no such directory or repository.
        EnvironmentFault: The Hub cannot be reached.
    """
    if is_local(name):
        directory = Path(name).expanduser()
        if not directory.is_dir():
            raise ConfigError(
                f"There is no directory {name}.",
                "check",
                "Give a directory of heads, or a Hub id.",
            )
        return directory
    patterns = ["*.json", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)]
    with hub_errors(f"repository of heads {name}", "check"):
        return Path(snapshot_download(name, allow_patterns=patterns))
