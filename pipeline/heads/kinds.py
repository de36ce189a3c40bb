"""The table of the kinds of draft heads, and a reader of heads from other trainers.

Layouts of other trainers that are recognized:

- Medusa heads under the names of their authors (`{k}.{l}.linear.weight`, `{k}.{L}.weight`, also
  inside a whole model as `medusa_head.…`) or of vLLM (`blocks.{k}.layers.{l}.weight`,
  `lm_heads.{k}.weight`). Without an lm_head they read the target's, as in TGI.
- EAGLE-1 models whose attention adds nothing (`o_proj` is zero) and whose `fc` has no bias. They
  are read as a recurrent cell.

Other EAGLE-1 models need the states of every earlier position, which native decoding does not keep.
Only vLLM can measure them.
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
from pipeline.config.training import LmHead, TrainConfig
from pipeline.errors import ConfigError, DataError
from pipeline.heads.eagle3 import Eagle3Heads
from pipeline.heads.kind import Heads, TargetWeights
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.recurrent import ATTENTION, FC_BIAS, MLP, OUTPUT, RecurrentHeads
from pipeline.heads.shapes import (
    EPSILON,
    EXPANDED,
    SHARED,
    ExportFormat,
    HeadsShape,
    MedusaShape,
    RecurrentShape,
)

KINDS: dict[str, type[Heads]] = {
    "medusa": MedusaHeads,
    "recurrent": RecurrentHeads,
    "eagle3": Eagle3Heads,
}

VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.")
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.\d+\.weight")
IN_A_MODEL = "medusa_head."  # prefix of the names where the heads are in a whole model's files
GATE = f"{MLP}.gate_proj.weight"
NOT_HERE = (
    "Give Medusa heads, an EAGLE-1 cell whose attention is zero, or an export of medusa-distill."
)
REPEATED = ("embed_tokens.weight", "lm_head.weight")  # matrices of the target itself


def head_kind(name: str) -> type[Heads]:
    """Return the class of a kind of heads; raise ConfigError for an unknown name."""
    if name not in KINDS:
        raise ConfigError(
            f'Unknown kind of heads: "{name}".',
            "train.heads",
            f"Use one of {', '.join(KINDS)}.",
        )
    return KINDS[name]


def shape_from_json(content: Mapping[str, Any]) -> HeadsShape:
    """Read a heads shape from JSON.

    Raises:
        KeyError, TypeError, ValueError: The kind is missing or unknown, or fields are missing,
            unknown or out of range.
    """
    fields = dict(content)
    return KINDS[fields.pop("kind")].Shape(**fields)


def max_tree_depth(settings: TrainConfig) -> int:
    """Return how many tokens ahead the configured kind of heads can propose.

    Raises ConfigError for an unknown kind.
    """
    return _shape_of_any_target(settings).max_depth


def reads_rows(settings: TrainConfig) -> bool:
    """Return whether the configured kind of heads has `row_layers`: it reads whole rows.

    Raises ConfigError for an unknown kind.
    """
    return bool(_shape_of_any_target(settings).row_layers)


def _shape_of_any_target(settings: TrainConfig) -> HeadsShape:
    """Return the shape of the configured heads with sizes that are of no target."""
    return head_kind(settings.heads).shape_of(settings, 1, 1, 1_000)


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
    """The hidden size and vocabulary size of a target and its heads."""

    hidden_size: int
    vocab_size: int


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

    No heads are built from an EAGLE-1 model with attention or bias, which only vLLM can run.

    Args:
        tensors: The other trainer's heads.
        target: The target's lm_head and embedding, used where the heads have none of their own.
        sizes: The target's sizes.
        num_tokens: How many tokens a recurrent cell drafts; each Medusa head drafts one.

    Raises:
        DataError: The layout, dtype or activation is not supported; a tensor is missing, unknown,
            of another shape or not finite; or a stored embedding or lm_head of an EAGLE-1 model is
            not the target's.
    """
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
        raise tensors.refuse(
            f"These are neither Medusa heads nor an EAGLE-1 cell: there is {some}."
        )
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

    The common dtype is torch's promotion of all dtypes. Tensors whose names contain `left_out` are
    set to zeros. Raises DataError for a dtype outside `DTYPES`, and as `from_named_tensors` does.
    """
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
    return kind.from_named_tensors(shape, filled, format, where=str(tensors.directory))
