"""Read draft heads from other trainers.

Layouts that are recognized:

- Medusa heads under the names of their authors (`{k}.{l}.linear.weight`, `{k}.{L}.weight`, also
  inside a whole model as `medusa_head.…`) or of vLLM (`blocks.{k}.layers.{l}.weight`,
  `lm_heads.{k}.weight`). Without an lm_head they read the target's, as in TGI.
- EAGLE-1 models whose attention adds nothing (`o_proj` is zero) and whose `fc` has no bias. They
  are read as a recurrent cell.
- EAGLE-3 layers under the names of their authors (`midlayer.…`) or of speculators (`layers.0.…`).

Only vLLM can measure other EAGLE-1 models, whose attention reads the last layer's output after the
norm, and EAGLE-3 models with further norms, biases or layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pipeline.config import DTYPES
from pipeline.config.training import LmHead
from pipeline.errors import DataError
from pipeline.heads.eagle3 import Eagle3Heads, layers_of
from pipeline.heads.kind import DRAFT_VOCABULARY, Heads, TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import ATTENTION, FC_BIAS, MLP, OUTPUT, RecurrentHeads
from pipeline.heads.shapes import (
    EPSILON,
    EXPANDED,
    SHARED,
    Eagle3Shape,
    ExportFormat,
    HeadsShape,
    MedusaShape,
    RecurrentShape,
)

VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.\d+\.weight")
IN_A_MODEL = "medusa_head."  # prefix of the names where the heads are in a whole model's files
GATE = f"{MLP}.gate_proj.weight"
NOT_HERE = "Give Medusa heads, an EAGLE-1 or EAGLE-3 model, or an export of medusa-distill."
EMBEDDING = "embed_tokens.weight"
REPEATED = (EMBEDDING, "lm_head.weight")  # matrices of the target itself
EAGLE3_NORM = re.compile(r"(midlayer|layers\.0)\.hidden_norm\.weight")
# What the configurations of some EAGLE-3 models set, and the layer here does not have.
OTHER_EAGLE3 = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")


class NamedTensors(Protocol):
    """Another trainer's heads: their tensors by name, read on demand, and their config.json."""

    directory: Path
    config: dict[str, Any]

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors in the files of the heads."""

    def __getitem__(self, name: str) -> Tensor: ...

    def refuse(self, what: str, fix: str = NOT_HERE) -> DataError:
        """Return a DataError that says why these heads cannot be used, and how to fix it."""


@dataclass(frozen=True)
class Sizes:
    """The hidden size, vocabulary size and number of layers of a target."""

    hidden_size: int
    vocab_size: int
    num_layers: int


@dataclass(frozen=True)
class ForeignHeads:
    """Heads of another trainer, in a recognized layout.

    Attributes:
        heads: The built heads, or None if native decoding cannot run them.
        description: The recognized layout, in words.
        vllm_method: The `method` with which vLLM serves their directory unmodified, or None.
        why_not: Why native decoding cannot run them; empty if it can.
    """

    heads: Heads | None
    description: str
    vllm_method: str | None
    why_not: str = ""


def foreign_heads(
    tensors: NamedTensors, target: TargetWeights, sizes: Sizes, num_tokens: int
) -> ForeignHeads:
    """Recognize the layout of another trainer's draft heads, and build heads from it.

    No heads are built from EAGLE models that only vLLM can run.

    Args:
        tensors: The other trainer's heads.
        target: The target's lm_head and embedding, used where the heads have none of their own.
        sizes: The target's sizes.
        num_tokens: How many tokens an EAGLE model drafts; each Medusa head drafts one.

    Raises:
        DataError: The layout, dtype or activation is not supported; a tensor is missing, unknown,
            of another shape or not finite; or a stored embedding or lm_head of an EAGLE-1 model is
            not the target's.
    """
    if any(EAGLE3_NORM.fullmatch(name) for name in tensors.names):
        return _eagle3_heads(tensors, target, sizes, num_tokens)
    if "fc.weight" in tensors.names:
        return _eagle_heads(tensors, target, sizes, num_tokens)
    return _medusa_heads(tensors, target, sizes)


def _medusa_heads(tensors: NamedTensors, target: TargetWeights, sizes: Sizes) -> ForeignHeads:
    """Build heads of the kind `medusa` from another trainer's Medusa heads.

    If there is no lm_head, the heads read the target's. If there are no biases, they are zeros.
    """
    blocks, lm_heads = _medusa_names(tensors)
    num_heads = 1 + max(k for k, _, _ in blocks)
    num_layers = 1 + max(layer for _, layer, _ in blocks)
    lm_head: LmHead = "untied"
    if not lm_heads:
        lm_head = "tied"
    elif lm_heads.keys() == {0} and num_heads > 1:
        lm_head = "shared"
    named = {}
    for (k, layer, part), name in blocks.items():
        named[f"{k}.{layer}.linear.{part}"] = tensors[name]
    for k, name in lm_heads.items():
        named[f"{k}.{num_layers}.weight"] = tensors[name]
    if lm_head == "tied":
        named[f"0.{num_layers}.weight"] = target.lm_head()
    has_biases = any(part == "bias" for _, _, part in blocks)
    format = EXPANDED if lm_head == "untied" else SHARED
    shape = MedusaShape(sizes.hidden_size, sizes.vocab_size, num_heads, num_layers, lm_head)
    left_out = None if has_biases else ".bias"
    heads = _build_heads(MedusaHeads, shape, format, tensors, named, left_out)
    return ForeignHeads(heads, f"{num_heads} Medusa heads", vllm_method=None)


def _medusa_names(
    tensors: NamedTensors,
) -> tuple[dict[tuple[int, int, str], str], dict[int, str]]:
    """Return the stored names of Medusa heads' tensors: two dictionaries, blocks and lm_heads.

    Blocks are keyed by head, layer and part (`weight` or `bias`), lm_heads by head. In a whole
    model's files, only names with the prefix `medusa_head.` are read. Raises DataError if one of
    these is unknown, or if there is no block.
    """
    blocks = {}
    lm_heads = {}
    unknown = []
    is_in_a_model = any(name.startswith(IN_A_MODEL) for name in tensors.names)
    for stored in sorted(tensors.names):
        if is_in_a_model and not stored.startswith(IN_A_MODEL):
            continue
        name = VLLM_BLOCK.sub(r"\1.\2.linear.", stored.removeprefix(IN_A_MODEL))
        if block := BLOCK.fullmatch(name):
            blocks[int(block[1]), int(block[2]), block[3]] = stored
        elif lm_head := LM_HEAD.fullmatch(name):
            lm_heads[int(lm_head[1] or lm_head[2])] = stored
        else:
            unknown.append(stored)
    if unknown or not blocks:
        some = ", ".join((unknown or sorted(tensors.names))[:3])
        raise tensors.refuse(f"These are neither Medusa heads nor an EAGLE model: there is {some}.")
    return blocks, lm_heads


def _eagle_heads(
    tensors: NamedTensors, target: TargetWeights, sizes: Sizes, num_tokens: int
) -> ForeignHeads:
    """Build heads of the kind `recurrent` from another trainer's EAGLE-1 model.

    If the output projection of the attention or the bias of `fc` is not zero, the result has a
    reason instead of heads. Raises DataError as `foreign_heads` does.
    """
    names = tensors.names
    for name in (OUTPUT, FC_BIAS):
        if name in names and tensors[name].any():
            why = f"{name} is not zero, and native decoding's cell has neither attention nor bias"
            return ForeignHeads(None, "an EAGLE-1 model with attention or bias", "eagle", why)
    for name, matrix in zip(REPEATED, (target.embedding, target.lm_head), strict=True):
        if name in names and not _is_same_matrix(tensors[name], matrix()):
            raise tensors.refuse(
                f"Its {name} is not the target's, which engines draft with.",
                "Give --target the model that these heads were trained on.",
            )
    activation = tensors.config.get("hidden_act", "silu")
    if activation != "silu":
        raise tensors.refuse(
            f"The draft model uses activation {activation}; only silu is supported.",
            "Measure it with the engine that it was trained for.",
        )
    inner = 1
    if GATE in names:
        inner = max(1, tensors[GATE].numel() // sizes.hidden_size)
    epsilon = float(tensors.config.get("rms_norm_eps", EPSILON))
    shape = RecurrentShape(sizes.hidden_size, sizes.vocab_size, num_tokens, inner, epsilon)
    named = {}
    for name in names:
        if name not in (*REPEATED, FC_BIAS) and not name.startswith(ATTENTION):
            named[name] = tensors[name]
    heads = _build_heads(RecurrentHeads, shape, EXPANDED, tensors, named, ATTENTION)
    heads.take_from(target)
    return ForeignHeads(heads, "a recurrent cell in EAGLE-1's container", "eagle")


def _eagle3_heads(
    tensors: NamedTensors, target: TargetWeights, sizes: Sizes, num_tokens: int
) -> ForeignHeads:
    """Build heads of the kind `eagle3` from another trainer's EAGLE-3 model.

    If the model is more than one layer of this kind, the result has a reason instead of heads.
    Raises DataError as `foreign_heads` does.
    """
    named = {}
    for name in tensors.names:
        named[re.sub(r"^midlayer\.", "layers.0.", name)] = tensors[name]
    num_rows = len(named["d2t"]) if "d2t" in named else sizes.vocab_size
    shape = _eagle3_shape(tensors, sizes, num_tokens, num_rows)
    own_embedding = named.pop(EMBEDDING, None)
    why_not = _other_eagle3(_layer_config(tensors), sizes)
    unknown = sorted(named.keys() - {*Eagle3Heads.shapes(shape, EXPANDED), *DRAFT_VOCABULARY})
    if unknown:
        why_not = f"it has {unknown[0]}"
    elif own_embedding is not None and not _is_same_matrix(own_embedding, target.embedding()):
        why_not = "it has an embedding of its own"
    if why_not:
        why_not = f"{why_not}, which native decoding's EAGLE-3 layer has not"
        return ForeignHeads(None, "an EAGLE-3 model of another form", "eagle3", why_not)
    if "lm_head.weight" not in named:
        named["lm_head.weight"] = target.lm_head()
    if shape.is_pruned and "t2d" not in named:
        tokens_V = named["d2t"] + torch.arange(num_rows)
        named["t2d"] = torch.isin(torch.arange(sizes.vocab_size), tokens_V)
    elif not shape.is_pruned and "d2t" in named and not named["d2t"].any():
        named = {name: each for name, each in named.items() if name not in DRAFT_VOCABULARY}
    heads = _build_heads(Eagle3Heads, shape, EXPANDED, tensors, named, None)
    heads.take_from(target)
    return ForeignHeads(heads, "an EAGLE-3 layer", "eagle3")


def _layer_config(tensors: NamedTensors) -> dict[str, Any]:
    """Return the settings of an EAGLE-3 model, which some trainers nest, in one dictionary."""
    config = tensors.config
    nested = config.get("transformer_layer_config") or {}  # of speculators
    return {**(config.get("eagle_config") or {}), **nested, **config}


def _eagle3_shape(
    tensors: NamedTensors, sizes: Sizes, num_tokens: int, num_rows: int
) -> Eagle3Shape:
    """Return the shape of another trainer's EAGLE-3 layer with `num_rows` rows in its lm_head.

    Raises DataError if a size is missing or invalid.
    """
    config = _layer_config(tensors)
    layers = tensors.config.get("eagle_aux_hidden_state_layer_ids")
    if not layers and "eagle_aux_hidden_state_layer_ids" in config:
        layers = [layer + 1 for layer in config["eagle_aux_hidden_state_layer_ids"]]  # from 0
    rope = config.get("rope_parameters") or config
    try:
        num_heads = config["num_attention_heads"]
        return Eagle3Shape(
            sizes.hidden_size,
            num_rows,
            num_tokens,
            target_vocab_size=sizes.vocab_size,
            layers=tuple(sorted({*(layers or layers_of("auto", sizes.num_layers))})),
            intermediate_size=config["intermediate_size"],
            attention_heads=num_heads,
            key_value_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or config["hidden_size"] // num_heads,
            norm_eps=config.get("rms_norm_eps", EPSILON),
            rope_theta=rope.get("rope_theta", 10_000.0),
            norm_before_residual=config.get(
                "norm_before_residual", "transformer_layer_config" in config
            ),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise tensors.refuse(f"This is not the config.json of EAGLE-3: {error}.") from error


def _other_eagle3(config: Mapping[str, Any], sizes: Sizes) -> str:
    """Return what an EAGLE-3 model has that the layer here has not, by its configuration."""
    for name in OTHER_EAGLE3:
        if config.get(name):
            return f"it has {name}"
    if not config.get("use_aux_hidden_state", True):
        return "it has an input without layers of the target"
    for name in ("hidden_size", "target_hidden_size"):
        width = config.get(name) or sizes.hidden_size
        if width != sizes.hidden_size:
            return f"it has {name} {width}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return "it has scaled rotary positions"
    if "sliding_attention" in (config.get("layer_types") or ()):
        return "it has a sliding window"
    activation = config.get("hidden_act", "silu")
    return "" if activation == "silu" else f"it has activation {activation}"


def _is_same_matrix(found: Tensor, own: Tensor) -> bool:
    """Return whether a stored matrix is the target's, up to rounding to the narrower dtype."""
    if found.shape != own.shape:
        return False
    return torch.equal(found.to(own.dtype), own.to(found.dtype).to(own.dtype).cpu())


def _build_heads(
    kind: type[Heads],
    shape: HeadsShape,
    format: ExportFormat,
    tensors: NamedTensors,
    named: Mapping[str, Tensor],
    left_out: str | None,
) -> Heads:
    """Build heads of a kind on the CPU from another trainer's tensors, in their common dtype.

    The common dtype is torch's promotion of all dtypes but those of a draft vocabulary. Tensors
    whose names contain `left_out` are
    set to zeros. Raises DataError for a dtype outside `DTYPES`, and as `from_named_tensors` does.
    """
    vocabulary = {}
    for name in named.keys() & DRAFT_VOCABULARY.keys():
        vocabulary[name] = named[name].to("cpu", getattr(torch, DRAFT_VOCABULARY[name]))
    named = {name: tensor for name, tensor in named.items() if name not in vocabulary}
    dtype = torch.bool  # narrower than any other
    for name, tensor in named.items():
        found = str(tensor.dtype).removeprefix("torch.")
        if found not in DTYPES:
            raise tensors.refuse(f"{name} is {found}.", f"Save it as {' or '.join(DTYPES)}.")
        dtype = torch.promote_types(dtype, tensor.dtype)
    filled = {name: tensor.detach().to("cpu", dtype) for name, tensor in named.items()}
    if left_out is not None:
        for name, size in kind.shapes(shape, format).items():
            if left_out in name:
                filled[name] = torch.zeros(size, dtype=dtype)
    filled |= vocabulary
    return kind.from_named_tensors(shape, filled, format, where=str(tensors.directory))
