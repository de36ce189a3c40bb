"""Trained heads as one directory that vLLM, TGI and TensorRT-LLM load unmodified, and back.

It promises that the weights file holds exactly the tensors that `ExportConfig.shapes` names, finite and bit for bit as
they were handed in (engines drop unknown tensors silently and run on garbage where one is missing), and that no other
weights lie beside it. Safetensors only, in one file: 70B heads with a vocabulary of 128k are about 12 GB in bfloat16.

Tied heads expand to K copies on disk, not in memory: the file is serialised from pointers, K of them to one tensor.
Converting to another dtype holds the converted heads beside the original ones.

Shapes: D hidden size, V vocabulary, K heads, L blocks per head.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch import Tensor

from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.export.layout import (
    CARD_FILE,
    CHOICES_FILE,
    CONFIG_FILE,
    WEIGHT_SUFFIXES,
    WEIGHTS_FILE,
    ExportConfig,
    check_vocabulary,
    read_config,
)
from pipeline.export.whole_directory import files_in, whole_directory


def write_export(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, Tensor],
    config: ExportConfig,
    *,
    tokenizer: Any,
    choices: Sequence[Sequence[int]],
    card: str,
) -> list[Path]:
    """Write heads, configuration, tokenizer, tree and model card, read them back, and only then put them in place.

    Args:
        directory: Made by one rename if it does not exist. If it does, its files are replaced one by one, the
            configuration last, and whoever owns it says when it is whole.
        tensors: `{k}.{l}.linear.weight` [D, D], `.bias` [D] and `{k}.{L}.weight` [V, D] for every head k; tied heads
            name one tensor K times. Any device, any float dtype.
        tokenizer: Anything with `save_pretrained(directory)`.
        choices: The tree's paths, checked already.
        card: The text of `README.md`.

    Returns the files. Raises ConfigError for what cannot be exported, DataError for tensors that are not those heads,
    EnvironmentFault for a full disk; whatever is raised, nothing is left behind.
    """
    directory = Path(directory)
    saved = tensors_as_saved(tensors, config)
    try:
        with whole_directory(directory) as partial:
            tokenizer.save_pretrained(str(partial))
            _serialise(saved, partial / WEIGHTS_FILE)
            _write_json(partial / CHOICES_FILE, [list(path) for path in choices])
            (partial / CARD_FILE).write_text(card, encoding="utf-8")
            _write_json(partial / CONFIG_FILE, config.to_json())
            # safetensors makes its file readable to its owner alone; a server often runs as somebody else
            shutil.copymode(partial / CONFIG_FILE, partial / WEIGHTS_FILE)
            _compare(partial, saved, config)
            files = files_in(partial)
    except (OSError, SafetensorError) as error:
        fix = f"It takes {sum(tensor.nbytes for tensor in saved.values()) / 1e9:.1f} GB; see to the disk and run again."
        raise EnvironmentFault(f"The export cannot be written: {error}.", str(directory), fix) from error
    return [directory / file for file in files]


def read_export(directory: str | os.PathLike[str]) -> tuple[ExportConfig, dict[str, Tensor]]:
    """Read a whole export, whichever its format: its settings, and every head's tensors by name.

    Tied heads come back as K names of one [V, D] tensor. Raises DataError where a tensor is missing, unknown, of
    another shape or dtype, or where other weights lie beside the heads.
    """
    config = read_config(directory)
    with _open_weights(Path(directory), config) as file:
        names = config.shapes()
        lm_heads = config.lm_head_names()
        if not config.tied:
            return config, {name: file.get_tensor(name) for name in names}
        tensors = {name: file.get_tensor(name) for name in names if name not in lm_heads}
        return config, tensors | dict.fromkeys(lm_heads, file.get_tensor(lm_heads[0]))


def tensors_as_saved(tensors: Mapping[str, Tensor], config: ExportConfig) -> dict[str, Tensor]:
    """The heads as the file will hold them: contiguous, on the CPU, in the export's dtype, names that share one tensor
    still sharing it.

    Raises DataError for missing, unknown, misshapen or non-finite tensors; ConfigError where tied heads are not.
    """
    _check_names_and_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, config)
    dtype = getattr(torch, config.dtype)
    converted: dict[tuple[Any, ...], Tensor] = {}
    saved: dict[str, Tensor] = {}
    for name in replace(config, format="expanded").shapes():
        source = tensors[name].detach()
        key = (source.device, source.data_ptr(), source.shape, source.stride(), source.dtype)
        if key not in converted:
            converted[key] = source.to("cpu", dtype).contiguous()
            smallest, largest = converted[key].aminmax()  # isfinite() would hold a second lm_head
            if not (smallest.isfinite() and largest.isfinite()):
                raise DataError(
                    f"The tensor {name} holds numbers that are not finite in {config.dtype}.",
                    "heads",
                    "Train again with a lower learning rate, or export in bfloat16 or float32.",
                )
        saved[name] = converted[key]
    if config.tied:
        first, *others = config.lm_head_names()
        if untied := [name for name in others if not _same_bits(saved[name], saved[first])]:
            raise ConfigError(
                f"The heads are said to be tied, and {untied[0]} is not {first}.",
                "train.medusa.lm_head",
                "Export them as untied heads.",
            )
    return {name: saved[name] for name in config.shapes()}


def _check_names_and_shapes(found: Mapping[str, tuple[int, ...]], config: ExportConfig) -> None:
    """Heads in memory name every lm_head, also those that the shared format stores once."""
    _check_shapes(found, replace(config, format="expanded"), "heads")


def _check_shapes(found: Mapping[str, tuple[int, ...]], config: ExportConfig, where: str) -> None:
    expected = config.shapes()
    first_lm_head = config.lm_head_names()[0]
    if len(found.get(first_lm_head, ())) == 2:
        check_vocabulary(found[first_lm_head][0], config.vocab_size)
    problems = [f"{name} is missing" for name in expected if name not in found]
    problems += [f"{name} is unknown" for name in found if name not in expected]
    problems += [
        f"{name} has shape {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise DataError(
            f"These are not {config.num_heads} heads of {config.num_layers} block(s) for a hidden size of "
            f"{config.hidden_size} and a vocabulary of {config.vocab_size}: {', '.join(problems[:3])}{more}.",
            where,
            "Export again from the heads and the target that belong together.",
        )


def _compare(directory: Path, saved: Mapping[str, Tensor], config: ExportConfig) -> None:
    if read_config(directory) != config:
        raise DataError("The configuration is another one.", str(directory / CONFIG_FILE), "Export again.")
    with _open_weights(directory, config) as file:
        for name, tensor in saved.items():
            if not _same_bits(file.get_tensor(name), tensor):
                where = str(directory / WEIGHTS_FILE)
                raise DataError(f"The tensor {name} is not the one that was trained.", where, "Export again.")


def _open_weights(directory: Path, config: ExportConfig) -> Any:
    """The weights file, opened lazily, once its names, shapes and dtypes are known to be right."""
    path = directory / WEIGHTS_FILE
    strangers = [p.name for p in sorted(directory.iterdir()) if p.suffix in WEIGHT_SUFFIXES and p.name != WEIGHTS_FILE]
    if strangers:
        raise DataError(
            f"Other weights lie beside the heads ({', '.join(strangers)}), and vLLM would load them too.",
            str(directory),
            "Move them elsewhere.",
        )
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DataError(f"The weights cannot be read: {error}.", str(path), "Export again.") from error
    slices = {name: file.get_slice(name) for name in file.offset_keys()}
    _check_shapes({name: tuple(part.get_shape()) for name, part in slices.items()}, config, str(path))
    wanted = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[config.dtype]
    if wrong := [name for name, part in slices.items() if part.get_dtype() != wanted]:
        raise DataError(f"The tensor {wrong[0]} is not {config.dtype}.", str(path), "Export again.")
    return file


def _serialise(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file in which several names may have one tensor's bytes.

    `safetensors.torch.save_file` refuses shared memory, so the copies would have to exist in memory first.
    """
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


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape:
        return True
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2 if isinstance(content, dict) else None) + "\n", encoding="utf-8")
