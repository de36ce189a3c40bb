"""Trained heads as one directory that engines load unmodified, and back.

It promises that the weights file holds exactly the tensors that the kind of heads names, finite and
bit for bit as they were trained (engines drop unknown tensors silently and run on garbage where one
is missing), and that no other weights lie beside it. One file of them: 70B Medusa heads with a
vocabulary of 128k are about 12 GB in bfloat16. Further formats are whole directories in this one,
named like the format (`heads/shapes.py`).

Heads that share one tensor under several names expand on disk and not in memory: the file is
serialized from pointers. Converting to another dtype holds the converted heads beside the original
ones.
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
from pipeline.heads.kind import TOKEN_MAP, Heads, TargetWeights, is_finite
from pipeline.heads.shapes import require_shapes
from pipeline.storage.atomic import atomic_directory, files_in
from pipeline.targets.loading import lm_head_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def write_export(
    directory: str | os.PathLike[str],
    heads: Heads,
    layout: ExportLayout,
    *,
    target: Mapping[str, Any],
    tokenizer: Any,
    choices: Sequence[Sequence[int]],
    card: str,
    further: Sequence[str] = (),
) -> list[Path]:
    """Write heads, configuration, tokenizer, tree and model card, read them back, and only then put
    them in place.

    Args:
        directory: Made by one rename if it does not exist. If it does, its files are replaced one
            by one, the configuration last, and whoever owns it says when it is whole.
        heads: On any device, in any float dtype.
        target: The target's own config.json.
        tokenizer: Anything with `save_pretrained(directory)`.
        choices: The tree's paths, checked already.
        card: The text of `README.md`.
        further: Other formats of the same heads, each as a whole directory of its name, but for the
            card.

    Returns the files. Raises DataError for numbers that are not finite, EnvironmentFault for a full
    disk; whatever is raised, nothing is left behind.
    """
    directory, num_bytes = Path(directory), 0
    try:
        with atomic_directory(directory, last=CONFIG_FILE) as partial:
            for place, one in places(partial, layout, further).items():
                place.mkdir(exist_ok=True)
                saved = tensors_as_saved(heads, one)
                num_bytes += sum(tensor.nbytes for tensor in saved.values())
                tokenizer.save_pretrained(str(place))
                write_weights(saved, place / one.weights_file)
                _write_json(place / one.kind.choices_file, [list(path) for path in choices])
                _write_json(place / CONFIG_FILE, one.to_json(target))
                _compare(place, saved, one)
            (partial / CARD_FILE).write_text(card, encoding="utf-8")
            files = files_in(partial)
    except (OSError, SafetensorError) as error:
        fix = f"It takes {num_bytes / 1e9:.1f} GB and more; see to the disk and run again."
        raise EnvironmentFault(
            f"The export cannot be written: {error}.", str(directory), fix
        ) from error
    return [directory / file for file in files]


def places(root: Path, layout: ExportLayout, further: Sequence[str]) -> dict[Path, ExportLayout]:
    """Where each format lies: the first at the root, every other one in a directory of its name."""
    return {root: layout} | {root / name: replace(layout, format=name) for name in further}


def read_heads(directory: str | os.PathLike[str], model: PreTrainedModel) -> Heads:
    """The heads of an export, in its dtype, on the CPU; matrices that it leaves out are those of
    `model`, its target.

    Raises:
        DataError: A tensor is missing, unknown, of another shape or dtype, or other weights lie
            beside the heads.
    """
    layout, path = read_layout(directory), Path(directory)
    target = TargetWeights(
        lambda: lm_head_weight(model), lambda: model.get_input_embeddings().weight.detach()
    )
    tensors = _open_weights(path, layout).tensors()
    heads = layout.kind.from_named_tensors(layout.shape, tensors, layout.stored, where=str(path))
    heads.take_from(target.drafting(heads.vocabulary.token_map))
    return heads


def read_tree(directory: str | os.PathLike[str]) -> tuple[TreePath, ...] | DynamicTree:
    """The tree to decode an export with: a dynamic one where its `config.json` has one, else that
    of its choices file.

    Raises:
        ConfigError: It is no tree, or not one of these heads.
        DataError: It cannot be read.
    """
    layout = read_layout(directory)
    tree = layout.dynamic_tree or read_paths(Path(directory, layout.kind.choices_file))
    return check_tree(tree, layout.shape.max_depth, layout.shape.vocab_size)


def tensors_as_saved(heads: Heads, layout: ExportLayout) -> dict[str, Tensor]:
    """The heads as the file will hold them: contiguous, on the CPU, in the export's dtype, names
    that share one tensor still sharing it.

    Raises DataError for numbers that are not finite.
    """
    dtype = getattr(torch, layout.dtype)
    converted: dict[tuple[Any, ...], Tensor] = {}
    saved: dict[str, Tensor] = {}
    for name, source in heads.stored_tensors(layout.stored).items():
        key = (source.data_ptr(), source.shape, source.stride())
        if key not in converted:
            converted[key] = source.to(
                "cpu", dtype if source.is_floating_point() else source.dtype
            ).contiguous()
            if not is_finite(converted[key]):
                raise DataError(
                    f"The tensor {name} holds numbers that are not finite in {layout.dtype}.",
                    "heads",
                    "Train again with a lower learning rate, or export in bfloat16 or float32.",
                )
        saved[name] = converted[key]
    return saved


def _compare(directory: Path, saved: Mapping[str, Tensor], layout: ExportLayout) -> None:
    if read_layout(directory) != layout:
        raise DataError(
            "The configuration is another one.", str(directory / CONFIG_FILE), "Export again."
        )
    file = _open_weights(directory, layout)
    for name, tensor in saved.items():
        if not torch.equal(file.tensor(name).view(torch.uint8), tensor.view(torch.uint8)):
            where = str(directory / layout.weights_file)
            raise DataError(
                f"The tensor {name} is not the one that was trained.", where, "Export again."
            )


def _open_weights(directory: Path, layout: ExportLayout) -> WeightsFile:
    """The weights file, opened lazily, once its names, shapes and dtypes are known to be right."""
    path = directory / layout.weights_file
    strangers = [
        p.name
        for p in sorted(directory.iterdir())
        if p.suffix in WEIGHT_SUFFIXES and p.name != path.name
    ]
    if strangers:
        raise DataError(
            f"Other weights lie beside the heads ({', '.join(strangers)}), and vLLM would load them"
            " too.",
            str(directory),
            "Move them elsewhere.",
        )
    file = WeightsFile(path)
    require_shapes(
        layout.shape, layout.kind.shapes(layout.shape, layout.stored), file.shapes, str(path)
    )
    for name, dtype in file.dtypes.items():
        if dtype != ("int64" if name == TOKEN_MAP else layout.dtype):
            raise DataError(f"The tensor {name} is not {layout.dtype}.", str(path), "Export again.")
    return file


def _write_json(path: Path, content: object) -> None:
    path.write_text(
        json.dumps(content, indent=2 if isinstance(content, dict) else None) + "\n",
        encoding="utf-8",
    )
