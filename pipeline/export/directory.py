"""Write and read the export directory of trained heads, which engines load unmodified.

The weights file holds exactly the tensors of the kind of heads, finite and bit for bit as trained:
engines ignore unknown tensors silently, and run with garbage if one is missing. The directory holds
no other weights. Each further format is a complete subdirectory, named after the format.

Medusa heads of a 70B target with a vocabulary of 128k take about 12 GB in bfloat16. Conversion to
another dtype holds the converted heads beside the original ones.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from pipeline.artifacts.tree_file import read_paths
from pipeline.decoding.dynamic_tree import DynamicTree, check_tree
from pipeline.decoding.tree import TreePath
from pipeline.errors import DataError, EnvironmentFault
from pipeline.export.layout import CARD_FILE, CONFIG_FILE, ExportLayout, read_layout
from pipeline.export.weights import WEIGHT_SUFFIXES, WeightsFile, write_weights
from pipeline.heads.kind import DRAFT_VOCABULARY, Heads, TargetWeights, is_finite
from pipeline.heads.shapes import require_shapes
from pipeline.storage.atomic import atomic_directory, files_in
from pipeline.targets.loading import lm_head_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_export(
    directory: Path,
    heads: Heads,
    layout: ExportLayout,
    *,
    target: Mapping[str, Any],
    tokenizer: Any,
    choices: Sequence[Sequence[int]],
    card: str,
    further: Sequence[str] = (),
) -> list[Path]:
    """Write an export: heads, config.json, tokenizer, tree and card; verify the written weights.

    Args:
        directory: Created by one rename. If it exists, its files are replaced one by one, the
            configuration last.
        heads: On any device, in any float dtype.
        target: The target's own config.json.
        tokenizer: Anything with `save_pretrained(directory)`.
        choices: The tree's paths, already checked.
        card: The text of `README.md`.
        further: Names of other formats of the same heads.

    Returns:
        The paths of the written files.

    Raises:
        DataError: A number is not finite, or a written tensor is not the one that was trained.
        EnvironmentFault: A file cannot be written, for example on a full disk.
    """
    places = {Path(): layout}
    for name in further:
        places[Path(name)] = replace(layout, format=name)
    try:
        with atomic_directory(directory, last=CONFIG_FILE) as partial:
            for where, one in places.items():
                place = partial / where
                place.mkdir(exist_ok=True)
                saved = tensors_as_saved(heads, one)
                tokenizer.save_pretrained(place)
                write_weights(saved, place / one.kind.weights_file)
                paths = json.dumps(choices)
                (place / one.kind.choices_file).write_text(f"{paths}\n", "utf-8")
                config = json.dumps(one.to_json(target), indent=2)
                (place / CONFIG_FILE).write_text(f"{config}\n", "utf-8")
                _verify_weights(place, saved, one)
            (partial / CARD_FILE).write_text(card, "utf-8")
            files = files_in(partial)
    except (OSError, SafetensorError) as error:
        raise EnvironmentFault(
            f"The export cannot be written: {error}.",
            directory,
            "Free space, and run again.",
        ) from error
    return [directory / file for file in files]


def read_heads(directory: str | os.PathLike[str], model: PreTrainedModel) -> Heads:
    """Read the heads of an export directory, in the export's dtype, on the CPU.

    Matrices that the export leaves out are taken from `model`, the target.

    Raises:
        DataError: This is no export, a tensor is missing, unknown, not finite or of another shape
            or dtype, or other weights are beside the heads.
    """
    path = Path(directory)
    layout = read_layout(path)
    target = TargetWeights(
        lambda: lm_head_weight(model), lambda: model.get_input_embeddings().weight.detach()
    )
    file = _open_weights(path, layout)
    tensors = {name: file.tensor(name) for name in file.shapes}
    heads = layout.kind.from_named_tensors(layout.shape, tensors, layout.stored, where=str(path))
    heads.take_from(target.drafting(heads.vocabulary.token_map))
    return heads


def read_tree(directory: str | os.PathLike[str]) -> tuple[TreePath, ...] | DynamicTree:
    """Read an export's tree: the dynamic tree in `config.json`, or the choices file.

    Raises:
        ConfigError: The content is not a tree, or does not fit these heads.
        DataError: A file cannot be read, or holds no list of paths.
    """
    layout = read_layout(directory)
    tree = layout.dynamic_tree or read_paths(Path(directory, layout.kind.choices_file))
    return check_tree(tree, layout.shape.max_depth, layout.shape.vocab_size)


def tensors_as_saved(heads: Heads, layout: ExportLayout) -> dict[str, Tensor]:
    """Convert the heads' tensors to the export's dtype, contiguous and on the CPU.

    Only floats are converted. Names that share a tensor share the converted tensor too.

    Raises:
        DataError: A number is not finite.
    """
    dtype = getattr(torch, layout.dtype)
    converted = {}
    saved = {}
    for name, source in heads.stored_tensors(layout.stored).items():
        key = (source.data_ptr(), source.shape, source.stride())
        if key not in converted:
            wanted = dtype if source.is_floating_point() else source.dtype
            converted[key] = source.to("cpu", wanted).contiguous()
            if not is_finite(converted[key]):
                raise DataError(
                    f"The tensor {name} holds numbers that are not finite in {layout.dtype}.",
                    "heads",
                    "Train again with a lower learning rate, or export in bfloat16 or float32.",
                )
        saved[name] = converted[key]
    return saved


def _verify_weights(directory: Path, saved: Mapping[str, Tensor], layout: ExportLayout) -> None:
    """Raise DataError unless the export's weights file holds the saved tensors bit for bit."""
    file = _open_weights(directory, layout)
    for name, tensor in saved.items():
        if not torch.equal(file.tensor(name).view(torch.uint8), tensor.view(torch.uint8)):
            raise DataError(
                f"The tensor {name} is not the one that was trained.",
                directory,
                "Export again.",
            )


def _open_weights(directory: Path, layout: ExportLayout) -> WeightsFile:
    """Open an export's weights file; raise DataError unless it holds just the expected tensors.

    Other weights files in the directory raise DataError too.
    """
    path = directory / layout.kind.weights_file
    others = []
    for file in sorted(directory.iterdir()):
        if file.suffix in WEIGHT_SUFFIXES and file.name != path.name:
            others.append(file.name)
    if others:
        raise DataError(
            f"vLLM would load the other weights beside the heads: {', '.join(others)}.",
            directory,
            "Move them elsewhere.",
        )
    weights = WeightsFile(path)
    expected = layout.kind.shapes(layout.shape, layout.stored)
    require_shapes(layout.shape, expected, weights.shapes, str(path))
    for name, dtype in weights.dtypes.items():
        expected_dtype = DRAFT_VOCABULARY.get(name, layout.dtype)
        if dtype != expected_dtype:
            raise DataError(f"The tensor {name} is not {expected_dtype}.", path, "Export again.")
    return weights
