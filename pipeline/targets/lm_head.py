"""Reads the target's lm_head and input embedding from its weight files, without loading the model.

Training from cached features needs only these [V, D] matrices of a target. Reading one takes a
second; loading a 70B target would take minutes and 140 GB. Where the files are ambiguous, the model
is loaded.

Letters: D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.targets import files
from pipeline.targets.loading import lm_head_weight, load_causal_lm
from pipeline.targets.spec import TargetSpec, model_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTPUT_EMBEDDINGS = ("lm_head.weight", "embed_out.weight", "output.weight")
OUTPUT_BIASES = ("lm_head.bias", "embed_out.bias", "output.bias")
MULTIPLIERS = (
    "logit_scale",
    "lm_head_multiplier",
    "output_multiplier",
)  # of the logits: Cohere, Falcon-H1, Muse
INPUT_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
)


def read_lm_head(spec: TargetSpec) -> Tensor:
    """The lm_head's weight [V, D], on the CPU, in the target's dtype.

    For a tied target this is the input embedding. Of a Hub target only the file that holds it is
    downloaded.

    Raises:
        ConfigError: The target has no linear lm_head, or cannot be loaded.
        EnvironmentFault: The Hub cannot be reached.
    """
    return _matrix(spec, OUTPUT_EMBEDDINGS, lm_head_weight)


def read_embedding(spec: TargetSpec) -> Tensor:
    """The target's input embedding [V, D], as `read_lm_head` reads the lm_head."""
    return _matrix(
        spec, INPUT_EMBEDDINGS, lambda model: model.get_input_embeddings().weight.detach()
    )


def require_lm_head(spec: TargetSpec) -> None:
    """Raise ConfigError where the target's files lack its lm_head.

    vLLM leaves such a one as memory happens to be, and says nothing; any other tensor it misses by
    itself.
    """
    names = _weight_map(spec)
    if (
        names
        and not model_config(spec).get_text_config().tie_word_embeddings
        and not _named(names, OUTPUT_EMBEDDINGS)
    ):
        load_causal_lm(spec)  # which refuses it, unless this family has another name for it


class LogitChanges(NamedTuple):
    """What a target adds to its lm_head's product: `softcap · tanh(scale · (W x + bias_V) /
    softcap)`.
    """

    bias_V: Tensor | None
    scale: float
    softcap: float | None


def read_logit_changes(spec: TargetSpec) -> LogitChanges:
    """The lm_head's bias, and the scale and cap of the logits that some families have; as
    `read_lm_head` reads it.
    """
    text, file_of = model_config(spec).get_text_config(), _weight_map(spec)
    found, bias_V = _named(file_of, OUTPUT_BIASES), None
    if len(found) == 1:
        bias_V = _read(files.find_file(spec.model, spec.revision, file_of[found[0]]), found[0])
    elif found or not file_of:
        bias_V = getattr(load_causal_lm(spec).get_output_embeddings(), "bias", None)
    if bias_V is not None:
        bias_V = bias_V.detach().to(getattr(torch, spec.dtype))
    scale = math.prod(float(getattr(text, name, None) or 1.0) for name in MULTIPLIERS)
    scaling = float(
        getattr(text, "logits_scaling", None) or 1.0
    )  # a divisor in Granite, a factor elsewhere
    scale = scale / scaling if text.model_type.startswith("granite") else scale * scaling
    softcap = getattr(text, "final_logit_softcapping", None)
    return LogitChanges(bias_V, scale, None if softcap is None else float(softcap))


def _matrix(
    spec: TargetSpec, endings: tuple[str, ...], of: Callable[[PreTrainedModel], Tensor]
) -> Tensor:
    """The tensor of the files where exactly one matches by name and shape, otherwise that `of` the
    loaded model.
    """
    text, file_of = model_config(spec).get_text_config(), _weight_map(spec)
    candidates = _named(file_of, endings)
    if endings is OUTPUT_EMBEDDINGS and text.tie_word_embeddings:
        candidates = [] if candidates else _named(file_of, INPUT_EMBEDDINGS)
    weight = None
    if len(candidates) == 1:
        weight = _read(
            files.find_file(spec.model, spec.revision, file_of[candidates[0]]), candidates[0]
        )
    if (
        weight is None
        or not weight.is_floating_point()
        or weight.shape != (text.vocab_size, text.hidden_size)
    ):
        weight = of(load_causal_lm(spec)).clone()
    return weight.to(getattr(torch, spec.dtype))


def _weight_map(spec: TargetSpec) -> dict[str, str]:
    """The file of each tensor; empty where no index or single file exists."""
    for single, index in zip(files.SINGLE_WEIGHTS, files.WEIGHT_INDEXES, strict=True):
        if (path := files.find_file(spec.model, spec.revision, single)) is not None:
            return dict.fromkeys(_names(path), single)
        if (path := files.find_file(spec.model, spec.revision, index)) is not None:
            return files.read_index(path)
    return {}


def _named(names: Collection[str], endings: tuple[str, ...]) -> list[str]:
    return [
        name
        for name in names
        if any(name == ending or name.endswith(f".{ending}") for ending in endings)
    ]


def _names(path: Path) -> list[str]:
    if path.suffix != ".safetensors":
        return list(_load_bin(path))
    with safe_open(path, "pt") as file:
        return list(file.keys())


def _read(path: Path | None, name: str) -> Tensor | None:
    if path is None:
        return None
    if path.suffix != ".safetensors":
        return _load_bin(path)[name].clone()
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def _load_bin(path: Path) -> dict[str, Tensor]:
    """A `*.bin` checkpoint, memory-mapped; the weights-only loader runs no code."""
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
