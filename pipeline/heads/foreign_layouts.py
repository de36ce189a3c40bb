"""Heads of other trainers, made of named tensors: Medusa heads, and EAGLE-1 cells.

Known are

- Medusa heads under the names of their authors (`{k}.{l}.linear.weight`, `{k}.{L}.weight`, also
  inside of a whole model as `medusa_head.…`) or of vLLM (`blocks.{k}.layers.{l}.weight`,
  `lm_heads.{k}.weight`). Without an lm_head they read the target's, as TGI has it.
- EAGLE-1's container where its attention adds nothing (`o_proj` is zero) and `fc` has no bias: a
  recurrent cell.

An EAGLE-1 model with attention needs the states of every earlier position, which native decoding
does not keep: it is told apart, and vLLM alone can measure it.
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
from pipeline.heads.export_format import EXPANDED, SHARED
from pipeline.heads.kind import Heads, TargetWeights
from pipeline.heads.medusa import MedusaHeads, MedusaShape
from pipeline.heads.recurrent import (
    ATTENTION,
    EPSILON,
    FC_BIAS,
    OUTPUT,
    RecurrentHeads,
    RecurrentShape,
)

BLOCK = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?(weight|bias)")
LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.\d+\.weight")
IN_A_MODEL = "medusa_head."  # before the names, where the heads lie inside of a whole model's files
THE_TARGETS = (
    "embed_tokens.weight",
    "lm_head.weight",
)  # matrices that an EAGLE-1 container may repeat
READ = [getattr(torch, name) for name in DTYPES]
AS_READ = " or ".join(DTYPES)
NOT_HERE = (
    "Give Medusa heads, an EAGLE-1 cell whose attention is zero, or an export of medusa-distill."
)
OTHER_TARGET = "Give --target the model that these heads were trained on."


class NamedTensors(Protocol):
    """Tensors by name, read when they are asked for, and the configuration beside them."""

    directory: Path
    config: dict[str, Any]

    @property
    def names(self) -> Collection[str]: ...

    def __getitem__(self, name: str) -> Tensor: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def refuse(self, what: str, fix: str = NOT_HERE) -> DataError: ...


@dataclass(frozen=True)
class Sizes:
    """What heads and target must agree on."""

    hidden_size: int
    vocab_size: int


@dataclass(frozen=True)
class ForeignHeads:
    """Heads of another trainer.

    Attributes:
        heads: None where native decoding cannot have them; `why_not` then says why.
        described: What they were read as.
        as_they_are: Whether vLLM reads their directory unmodified, by `vllm_method`.
    """

    heads: Heads | None
    described: str
    vllm_method: str
    as_they_are: bool
    why_not: str = ""


def made_of(
    tensors: NamedTensors, target: TargetWeights, sizes: Sizes, num_tokens: int
) -> ForeignHeads:
    """The heads that these tensors are.

    Args:
        target: The matrices that heads may borrow.
        num_tokens: How many tokens a cell drafts; Medusa heads draft one each.

    Raises:
        DataError: No layout that is known, tensors that are missing or unknown, or heads of a
            target of other sizes.
    """
    if "fc.weight" in tensors.names:
        return _eagle_heads(tensors, target, sizes, num_tokens)
    return _medusa_heads(tensors, target, sizes)


def _medusa_heads(tensors: NamedTensors, target: TargetWeights, sizes: Sizes) -> ForeignHeads:
    inside = {
        name.removeprefix(IN_A_MODEL): name for name in tensors.names if name.startswith(IN_A_MODEL)
    }
    stored = inside or {name: name for name in tensors.names}
    blocks, lm_heads, unknown = _sorted_names(stored)
    if not blocks or unknown:
        some = ", ".join((unknown or sorted(stored))[:3])
        raise tensors.refuse(
            f"These are neither Medusa heads nor an EAGLE-1 cell: there is {some}."
        )
    num_heads, num_layers = (
        1 + max(k for k, _, _ in blocks),
        1 + max(layer for _, layer, _ in blocks),
    )
    if max(num_heads, num_layers) > len(blocks):  # which names alone could make of any size
        what = (
            f"There are {len(blocks)} tensors of {num_heads} heads with {num_layers} blocks each."
        )
        raise tensors.refuse(what, "Fetch the files again: some are missing.")
    _require_sizes(
        tensors,
        stored[blocks[0, 0, "weight"]] if (0, 0, "weight") in blocks else None,
        lm_heads,
        sizes,
    )
    lm_head: LmHead = (
        "tied" if not lm_heads else "shared" if set(lm_heads) == {0} and num_heads > 1 else "untied"
    )
    shape = MedusaShape(sizes.hidden_size, sizes.vocab_size, num_heads, num_layers, lm_head)
    named = {
        f"{k}.{layer}.linear.{part}": tensors[stored[name]]
        for (k, layer, part), name in blocks.items()
    }
    named |= {f"{k}.{num_layers}.weight": tensors[stored[name]] for k, name in lm_heads.items()}
    if not lm_heads:
        named[f"0.{num_layers}.weight"] = target.lm_head()
    if not any(part == "bias" for *_, part in blocks):
        for k in range(num_heads):
            named |= {
                f"{k}.{layer}.linear.bias": _zeros(sizes.hidden_size) for layer in range(num_layers)
            }
    format = EXPANDED if lm_head == "untied" else SHARED
    heads = MedusaHeads.from_named_tensors(
        shape, _of_one_dtype(named, tensors), format, where=str(tensors.directory)
    )
    described = f"{num_heads} Medusa heads, {num_layers} block(s) each, with {lm_head} lm_heads"
    return ForeignHeads(heads, described, "medusa", as_they_are=False)


def _sorted_names(
    names: Mapping[str, str],
) -> tuple[dict[tuple[int, int, str], str], dict[int, str], list[str]]:
    """The names of blocks by head, layer and part; those of lm_heads by head; and the others."""
    blocks, lm_heads, unknown = {}, {}, []
    for name in names:
        block, lm_head = BLOCK.fullmatch(name), LM_HEAD.fullmatch(name)
        if block and (".linear." in name or name.startswith("blocks.")):
            blocks[int(block[1]), int(block[2]), block[3]] = name
        elif lm_head:
            lm_heads[int(lm_head[1] or lm_head[2])] = name
        else:
            unknown.append(name)
    return blocks, lm_heads, sorted(unknown)


def _eagle_heads(
    tensors: NamedTensors, target: TargetWeights, sizes: Sizes, num_tokens: int
) -> ForeignHeads:
    fc = tensors.shape("fc.weight")
    if len(fc) != 2 or fc[1] != 2 * fc[0]:
        raise tensors.refuse(
            f"Its fc.weight is {list(fc)}, and EAGLE-1's reads an embedding and a state: [D, 2D]."
        )
    _require_hidden(tensors, fc[0], sizes)
    if OUTPUT in tensors.names and tensors[OUTPUT].any():
        why = (
            "This is an EAGLE-1 model with attention, which reads the states of all earlier"
            " positions: native decoding has recurrent cells alone"
        )
        return ForeignHeads(
            None, "an EAGLE-1 model with attention", "eagle", as_they_are=True, why_not=why
        )
    if FC_BIAS in tensors.names and tensors[FC_BIAS].any():
        why = "Its fc adds a bias, and native decoding's cell has none"
        return ForeignHeads(
            None, "an EAGLE-1 cell with a bias", "eagle", as_they_are=True, why_not=why
        )
    if (activation := tensors.config.get("hidden_act", "silu")) != "silu":
        raise tensors.refuse(f"Its activation is {activation}, and the cell's is silu.")
    for name, matrix in zip(THE_TARGETS, (target.embedding, target.lm_head), strict=True):
        if name in tensors.names and not _same(tensors[name], matrix()):
            raise tensors.refuse(
                f"Its {name} is not the target's, which engines draft with.", OTHER_TARGET
            )
    gate = "layers.0.mlp.gate_proj.weight"
    inner, *_ = (tensors.shape(gate) if gate in tensors.names else ()) or (1,)
    epsilon = tensors.config.get("rms_norm_eps", EPSILON)
    if not isinstance(epsilon, int | float):
        raise tensors.refuse(
            f"Its rms_norm_eps is no number but {epsilon!r}.", "Mend its config.json."
        )
    shape = RecurrentShape(
        sizes.hidden_size, sizes.vocab_size, num_tokens, inner, norm_eps=float(epsilon)
    )
    left_out = {
        *THE_TARGETS,
        FC_BIAS,
        *(name for name in tensors.names if name.startswith(ATTENTION)),
    }
    named = {name: tensors[name] for name in tensors.names if name not in left_out}
    wanted = RecurrentHeads.shapes(shape, EXPANDED)
    named |= {name: _zeros(*size) for name, size in wanted.items() if name.startswith(ATTENTION)}
    heads = RecurrentHeads.from_named_tensors(
        shape, _of_one_dtype(named, tensors), EXPANDED, where=str(tensors.directory)
    )
    heads.take_from(target)
    return ForeignHeads(heads, "a recurrent cell in EAGLE-1's container", "eagle", as_they_are=True)


def _require_sizes(
    tensors: NamedTensors, block: str | None, lm_heads: Mapping[int, str], sizes: Sizes
) -> None:
    if block is not None and tensors.shape(block):
        _require_hidden(tensors, tensors.shape(block)[-1], sizes)
    rows = {
        size[0]
        for name in lm_heads.values()
        if name in tensors.names and (size := tensors.shape(name))
    }
    if rows and rows != {sizes.vocab_size}:
        what = (
            f"The heads are of a vocabulary of {max(rows)} tokens, and the target's lm_head has"
            f" {sizes.vocab_size}."
        )
        raise tensors.refuse(what, OTHER_TARGET)


def _require_hidden(tensors: NamedTensors, hidden_size: int, sizes: Sizes) -> None:
    if hidden_size != sizes.hidden_size:
        what = (
            f"The heads read states of {hidden_size} numbers, and the target's have"
            f" {sizes.hidden_size}."
        )
        raise tensors.refuse(what, OTHER_TARGET)


def _same(found: Tensor, own: Tensor) -> bool:
    """Whether a repeated matrix is the target's, but for rounding to its dtype."""
    return found.shape == own.shape and torch.equal(
        found.to(own.dtype), own.to(found.dtype).to(own.dtype).cpu()
    )


def _zeros(*size: int) -> Tensor:
    """Zeros of the narrowest dtype, so that `_of_one_dtype` gives them the others'."""
    return torch.zeros(size, dtype=torch.bool)


def _of_one_dtype(named: Mapping[str, Tensor], tensors: NamedTensors) -> dict[str, Tensor]:
    """The tensors in the widest dtype among them."""
    dtype = torch.bool
    for name, tensor in named.items():
        if tensor.dtype not in (*READ, torch.bool):
            raise tensors.refuse(
                f"{name} is {tensor.dtype}".replace("torch.", "") + ".", f"Store it in {AS_READ}."
            )
        dtype = torch.promote_types(dtype, tensor.dtype)
    return {name: tensor.detach().to("cpu", dtype) for name, tensor in named.items()}
