"""A file of named tensors, written and read: safetensors, or the pickle of plain tensors that older
code reads.

A pickle is written by `torch.save` and read with `weights_only=True` alone, which runs no code of
the file's. A safetensors file is serialized from pointers, so that names that share one tensor
expand on disk and not in memory; a pickle stores their bytes once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from pipeline.errors import DataError

PICKLES = (".pt", ".pth", ".bin")
WEIGHT_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
)  # what engines take for weights
DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float64",
    "I64": "int64",
}  # safetensors' own


class WeightsFile:
    """The tensors of a file: shapes and dtypes by name, and each tensor when it is asked for."""

    def __init__(self, path: Path):
        """Open the file.

        Raises:
            DataError: It cannot be read, or holds something else than tensors; nothing of it is
                run.
        """
        self._tensors: dict[str, Tensor] | None = None
        if path.suffix in PICKLES:
            self._tensors = _unpickled(path)
            self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
            self.dtypes = {
                name: str(t.dtype).removeprefix("torch.") for name, t in self._tensors.items()
            }
            return
        try:
            self._file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            what, fix = (
                f"The weights cannot be read: {error}.",
                "Export again, or fetch the file again.",
            )
            raise DataError(what, str(path), fix) from error
        slices = {name: self._file.get_slice(name) for name in self._file.offset_keys()}
        self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        self.dtypes = {
            name: DTYPES.get(part.get_dtype(), part.get_dtype()) for name, part in slices.items()
        }

    def tensor(self, name: str) -> Tensor:
        return self._file.get_tensor(name) if self._tensors is None else self._tensors[name]

    def tensors(self) -> dict[str, Tensor]:
        return {name: self.tensor(name) for name in self.shapes}


def write_weights(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors of the CPU, several names of which may share one tensor's bytes.

    Raises OSError for a full disk.
    """
    if path.suffix in PICKLES:
        try:
            torch.save(dict(tensors), path)
        except RuntimeError as error:  # what its writer makes of a full disk
            raise OSError(f"{path.name}: {error}") from error
        return
    # `safetensors.torch.save_file` refuses shared memory, so the copies would have to exist in
    # memory first
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in tensors.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"})


def _unpickled(path: Path) -> dict[str, Tensor]:
    fix = "Convert it to safetensors where you trust it, or fetch the file again."
    try:
        with warnings.catch_warnings(action="ignore"):  # of a protocol that other writers use
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UnpicklingError as error:
        what = "This is no file of tensors: it holds other objects, whose code is not run here."
        raise DataError(what, str(path), fix) from error
    except Exception as error:  # zip, pickle and storage each have their own for damaged bytes
        first = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise DataError(f"The weights cannot be read: {first}.", str(path), fix) from error
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in content.items()
    ):
        raise DataError("This is no file of named tensors.", str(path), fix)
    return content
