"""Read the target's lm_head and input embedding from its files, without loading the model.

Training from cached features needs only these [V, D] matrices of a target. Reading one takes a
second; loading a 70B target would take minutes and 140 GB. The model is loaded only if the names or
shapes of the tensors do not show which one is the matrix.

Letters: D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.targets import files
from pipeline.targets.loading import lm_head_weight, load_causal_lm
from pipeline.targets.spec import TargetSpec, model_config

OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight", "output.weight")
OUTPUT_BIASES = ("lm_head.bias", "embed_out.bias", "output.bias")
INPUT_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
)
# factors of the logits in Cohere, Falcon-H1 and Muse
MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")


def read_lm_head(spec: TargetSpec) -> Tensor:
    """Return the target's lm_head weight [V, D], read from its files, in the target's dtype.

    For a target with tied embeddings this is the input embedding. Of a Hub target's weight files,
    only the index and the file with the matrix are downloaded. If the files do not show which
    tensor is the matrix, the model is loaded.

    Raises:
        ConfigError: The target has no linear lm_head, or cannot be loaded.
        EnvironmentFault: The Hub cannot be reached, or this machine cannot load the target.
    """
    file_of = _weight_map(spec)
    names = _names_ending(file_of, OUTPUT_EMBEDDINGS)
    if not names and _is_tied(spec):
        names = _names_ending(file_of, INPUT_EMBEDDINGS)
    weight_VD = _read_matrix(spec, file_of, names)
    if weight_VD is None:
        weight_VD = lm_head_weight(load_causal_lm(spec)).clone()
    return weight_VD.to(spec.torch_dtype)


def read_embedding(spec: TargetSpec) -> Tensor:
    """Return the target's input embedding [V, D], read from its files, in the target's dtype.

    If the files do not show which tensor is the matrix, the model is loaded.
    """
    file_of = _weight_map(spec)
    weight_VD = _read_matrix(spec, file_of, _names_ending(file_of, INPUT_EMBEDDINGS))
    if weight_VD is None:
        weight_VD = load_causal_lm(spec).get_input_embeddings().weight.detach().clone()
    return weight_VD.to(spec.torch_dtype)


def require_lm_head(spec: TargetSpec) -> None:
    """Raise ConfigError if the target's files lack its lm_head.

    vLLM would leave a missing lm_head uninitialised without an error; it reports any other missing
    tensor. If no tensor has a usual name of an lm_head, the model is loaded, which raises unless
    its family has another name for it.
    """
    names = _weight_map(spec)
    if names and not _is_tied(spec) and not _names_ending(names, OUTPUT_EMBEDDINGS):
        load_causal_lm(spec)


class LogitChanges(NamedTuple):
    """The bias, scale and soft cap that a target applies after its lm_head's product W x.

    The logits are `softcap · tanh(scale · (W x + bias_V) / softcap)`, or without a soft cap
    `scale · (W x + bias_V)`.
    """

    bias_V: Tensor | None
    scale: float
    softcap: float | None


def read_logit_changes(spec: TargetSpec) -> LogitChanges:
    """Return the bias, scale and soft cap of the target's logits, read from its files.

    If the files do not show whether there is a bias, the model is loaded.
    """
    file_of = _weight_map(spec)
    names = _names_ending(file_of, OUTPUT_BIASES)
    bias_V = None
    if len(names) == 1:
        bias_V = _read_tensor(spec, file_of[names[0]], names[0])
    elif names or not file_of:
        bias_V = getattr(load_causal_lm(spec).get_output_embeddings(), "bias", None)
    if bias_V is not None:
        bias_V = bias_V.detach().to(spec.torch_dtype)
    text = model_config(spec).get_text_config()
    scale = math.prod(float(getattr(text, name, None) or 1.0) for name in MULTIPLIERS)
    scaling = float(getattr(text, "logits_scaling", None) or 1.0)
    if text.model_type.startswith("granite"):  # a divisor in Granite, a factor elsewhere
        scale /= scaling
    else:
        scale *= scaling
    softcap = getattr(text, "final_logit_softcapping", None)
    return LogitChanges(bias_V, scale, None if softcap is None else float(softcap))


def _read_matrix(spec: TargetSpec, file_of: dict[str, str], names: list[str]) -> Tensor | None:
    """Read the tensor in `names`; None if it is no floating-point matrix [V, D].

    If `names` does not have exactly one name, return None too. `file_of` is that of `_weight_map`.
    """
    if len(names) != 1:
        return None
    weight = _read_tensor(spec, file_of[names[0]], names[0])
    text = model_config(spec).get_text_config()
    if weight.is_floating_point() and weight.shape == (text.vocab_size, text.hidden_size):
        return weight
    return None


def _weight_map(spec: TargetSpec) -> dict[str, str]:
    """Map the name of each tensor of the target to its weight file; empty without weight files."""
    for single, index in (files.SAFETENSORS, files.PICKLES):
        path = files.find_file(spec.model, spec.revision, single)
        if path is not None:
            return dict.fromkeys(_tensor_names(path), single)
        path = files.find_file(spec.model, spec.revision, index)
        if path is not None:
            return files.read_index(path)
    return {}


def _is_tied(spec: TargetSpec) -> bool:
    """Return whether the target's lm_head is tied to its input embedding."""
    return bool(model_config(spec).get_text_config().tie_word_embeddings)


def _names_ending(names: Collection[str], endings: tuple[str, ...]) -> list[str]:
    """Return the tensor names that end with one of these dotted names, such as `lm_head.weight`."""
    dotted = tuple(f".{ending}" for ending in endings)
    return [name for name in names if f".{name}".endswith(dotted)]


def _tensor_names(path: Path) -> list[str]:
    """Return the names of the tensors in a weight file."""
    if path.suffix != ".safetensors":
        return list(_load_bin(path))
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _read_tensor(spec: TargetSpec, file_name: str, name: str) -> Tensor:
    """Read one tensor from a weight file of the target, which is downloaded if needed."""
    path = files.find_file(spec.model, spec.revision, file_name)
    assert path is not None, file_name
    if path.suffix != ".safetensors":
        return _load_bin(path)[name].clone()
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def _load_bin(path: Path) -> dict[str, Tensor]:
    """Load a `*.bin` checkpoint as memory-mapped tensors; the weights-only loader runs no code."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
