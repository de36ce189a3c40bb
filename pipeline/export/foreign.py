"""Heads that were not made here, read from the files of other trainers: Medusa heads, and EAGLE-1 cells.

Read are

- Medusa heads under the names of their authors (`{k}.{l}.linear.weight`, `{k}.{L}.weight`, also inside of a whole model
  as `medusa_head.…`) or of vLLM (`blocks.{k}.layers.{l}.weight`, `lm_heads.{k}.weight`), in safetensors, or in a pickle
  of plain tensors that is read without running its code. Without an lm_head they read the target's, as TGI has it.
- EAGLE-1's container where its attention adds nothing (`o_proj` is zero) and `fc` has no bias: a recurrent cell.

An EAGLE-1 model with attention needs the states of every earlier position, which native decoding does not keep: it is
told apart, and vLLM alone can measure it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.config import DTYPES
from pipeline.config.training import LmHead
from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.export.layout import CONFIG_FILE
from pipeline.export.upload import WEIGHT_SUFFIXES
from pipeline.export.weights import WeightsFile
from pipeline.heads.export_format import EXPANDED, SHARED
from pipeline.heads.kind import Heads, TargetWeights
from pipeline.heads.medusa import MedusaHeads, MedusaShape
from pipeline.heads.recurrent import ATTENTION, EPSILON, FC_BIAS, OUTPUT, RecurrentHeads, RecurrentShape
from pipeline.storage.atomic import read_object
from pipeline.targets.files import is_local

BLOCK = re.compile(r"(?:blocks\.)?(\d+)\.(?:layers\.)?(\d+)\.(?:linear\.)?(weight|bias)")
LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight|(\d+)\.\d+\.weight")
IN_A_MODEL = "medusa_head."  # before the names, where the heads lie inside of a whole model's files
THE_TARGETS = ("embed_tokens.weight", "lm_head.weight")  # matrices that an EAGLE-1 container may repeat
READ = [getattr(torch, name) for name in DTYPES]
AS_READ = " or ".join(DTYPES)
NOT_HERE = "Give Medusa heads, an EAGLE-1 cell whose attention is zero, or an export of medusa-distill."
OTHER_TARGET = "Give --target the model that these heads were trained on."


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


def heads_directory(name: str) -> Path:
    """A directory of heads, or what the Hub has under this id, fetched.

    Raises:
        ConfigError: There is neither.
        EnvironmentFault: The Hub cannot be reached.
    """
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    if is_local(name):
        if not Path(name).expanduser().is_dir():
            raise ConfigError(f"There is no directory {name}.", "check", "Give a directory of heads, or a Hub id.")
        return Path(name).expanduser()
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", *(f"*{suffix}" for suffix in WEIGHT_SUFFIXES)]))
    except (hub.RepositoryNotFoundError, hub.HFValidationError) as error:
        fix = "Check the spelling; a private one needs `hf auth login`; a directory is written with ./ or /."
        raise ConfigError(f"There are no heads {name}, neither as a directory nor on the Hub.", "check", fix) from error
    except (OSError, hub.HTTPError) as error:
        fix = "Check the network, HF_ENDPOINT, HF_HUB_OFFLINE and the disk, or give a local directory."
        raise EnvironmentFault(
            f"The heads {name} cannot be fetched now ({type(error).__name__}).", "check", fix
        ) from error


def read_foreign(directory: Path, target: TargetWeights, sizes: Sizes, num_tokens: int) -> ForeignHeads:
    """The heads of a directory.

    Args:
        target: The matrices that heads may borrow.
        num_tokens: How many tokens a cell drafts; Medusa heads draft one each.

    Raises:
        DataError: No layout that is known, tensors that are missing or unknown, no tensors at all, or heads of a
            target of other sizes.
    """
    tensors = _Tensors(directory)
    if "fc.weight" in tensors.files:
        return _eagle(tensors, target, sizes, num_tokens)
    return _medusa(tensors, target, sizes)


class _Tensors:
    """All tensors of a directory's weights, under their names but for `model.`; read when they are asked for."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.config = read_object(directory / CONFIG_FILE)
        weights = [path for path in sorted(directory.iterdir()) if path.suffix in WEIGHT_SUFFIXES and path.is_file()]
        safe = [path for path in weights if path.suffix == ".safetensors"]
        if not weights:
            raise DataError("There are no weights here.", str(directory), NOT_HERE)
        self.files: dict[str, tuple[WeightsFile, str]] = {}
        for file in map(WeightsFile, safe or weights):
            self.files |= {name.removeprefix("model."): (file, name) for name in file.shapes}

    def __getitem__(self, name: str) -> Tensor:
        file, stored = self.files[name]
        return file.tensor(stored)

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored = self.files[name]
        return file.shapes[stored]

    def refuse(self, what: str, fix: str = NOT_HERE) -> DataError:
        return DataError(what, str(self.directory), fix)


def _medusa(tensors: _Tensors, target: TargetWeights, sizes: Sizes) -> ForeignHeads:
    inside = {name.removeprefix(IN_A_MODEL): name for name in tensors.files if name.startswith(IN_A_MODEL)}
    stored = inside or {name: name for name in tensors.files}
    blocks, lm_heads, unknown = _sorted_names(stored)
    if not blocks or unknown:
        some = ", ".join((unknown or sorted(stored))[:3])
        raise tensors.refuse(f"These are neither Medusa heads nor an EAGLE-1 cell: there is {some}.")
    num_heads, num_layers = 1 + max(k for k, _, _ in blocks), 1 + max(layer for _, layer, _ in blocks)
    if max(num_heads, num_layers) > len(blocks):  # which names alone could make of any size
        what = f"There are {len(blocks)} tensors of {num_heads} heads with {num_layers} blocks each."
        raise tensors.refuse(what, "Fetch the files again: some are missing.")
    _require_sizes(tensors, stored[blocks[0, 0, "weight"]] if (0, 0, "weight") in blocks else None, lm_heads, sizes)
    lm_head: LmHead = "tied" if not lm_heads else "shared" if set(lm_heads) == {0} and num_heads > 1 else "untied"
    shape = MedusaShape(sizes.hidden_size, sizes.vocab_size, num_heads, num_layers, lm_head)
    named = {f"{k}.{layer}.linear.{part}": tensors[stored[name]] for (k, layer, part), name in blocks.items()}
    named |= {f"{k}.{num_layers}.weight": tensors[stored[name]] for k, name in lm_heads.items()}
    if not lm_heads:
        named[f"0.{num_layers}.weight"] = target.lm_head()
    if not any(part == "bias" for *_, part in blocks):
        for k in range(num_heads):
            named |= {f"{k}.{layer}.linear.bias": _zeros(sizes.hidden_size) for layer in range(num_layers)}
    format = EXPANDED if lm_head == "untied" else SHARED
    heads = MedusaHeads.from_named_tensors(shape, _of_one_dtype(named, tensors), format, where=str(tensors.directory))
    described = f"{num_heads} Medusa heads, {num_layers} block(s) each, with {lm_head} lm_heads"
    return ForeignHeads(heads, described, "medusa", as_they_are=False)


def _sorted_names(names: Mapping[str, str]) -> tuple[dict[tuple[int, int, str], str], dict[int, str], list[str]]:
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


def _eagle(tensors: _Tensors, target: TargetWeights, sizes: Sizes, num_tokens: int) -> ForeignHeads:
    fc = tensors.shape("fc.weight")
    if len(fc) != 2 or fc[1] != 2 * fc[0]:
        raise tensors.refuse(f"Its fc.weight is {list(fc)}, and EAGLE-1's reads an embedding and a state: [D, 2D].")
    _require_hidden(tensors, fc[0], sizes)
    if OUTPUT in tensors.files and tensors[OUTPUT].any():
        why = (
            "This is an EAGLE-1 model with attention, which reads the states of all earlier positions: native decoding "
            "has recurrent cells alone"
        )
        return ForeignHeads(None, "an EAGLE-1 model with attention", "eagle", as_they_are=True, why_not=why)
    if FC_BIAS in tensors.files and tensors[FC_BIAS].any():
        why = "Its fc adds a bias, and native decoding's cell has none"
        return ForeignHeads(None, "an EAGLE-1 cell with a bias", "eagle", as_they_are=True, why_not=why)
    if (activation := tensors.config.get("hidden_act", "silu")) != "silu":
        raise tensors.refuse(f"Its activation is {activation}, and the cell's is silu.")
    for name, matrix in zip(THE_TARGETS, (target.embedding, target.lm_head), strict=True):
        if name in tensors.files and not _same(tensors[name], matrix()):
            raise tensors.refuse(f"Its {name} is not the target's, which engines draft with.", OTHER_TARGET)
    gate = "layers.0.mlp.gate_proj.weight"
    inner, *_ = (tensors.shape(gate) if gate in tensors.files else ()) or (1,)
    epsilon = tensors.config.get("rms_norm_eps", EPSILON)
    if not isinstance(epsilon, int | float):
        raise tensors.refuse(f"Its rms_norm_eps is no number but {epsilon!r}.", "Mend its config.json.")
    shape = RecurrentShape(sizes.hidden_size, sizes.vocab_size, num_tokens, inner, norm_eps=float(epsilon))
    left_out = {*THE_TARGETS, FC_BIAS, *(name for name in tensors.files if name.startswith(ATTENTION))}
    named = {name: tensors[name] for name in tensors.files if name not in left_out}
    wanted = RecurrentHeads.shapes(shape, EXPANDED)
    named |= {name: _zeros(*size) for name, size in wanted.items() if name.startswith(ATTENTION)}
    heads = RecurrentHeads.from_named_tensors(
        shape, _of_one_dtype(named, tensors), EXPANDED, where=str(tensors.directory)
    )
    heads.take_from(target)
    return ForeignHeads(heads, "a recurrent cell in EAGLE-1's container", "eagle", as_they_are=True)


def _require_sizes(tensors: _Tensors, block: str | None, lm_heads: Mapping[int, str], sizes: Sizes) -> None:
    if block is not None and tensors.shape(block):
        _require_hidden(tensors, tensors.shape(block)[-1], sizes)
    rows = {size[0] for name in lm_heads.values() if name in tensors.files and (size := tensors.shape(name))}
    if rows and rows != {sizes.vocab_size}:
        what = f"The heads are of a vocabulary of {max(rows)} tokens, and the target's lm_head has {sizes.vocab_size}."
        raise tensors.refuse(what, OTHER_TARGET)


def _require_hidden(tensors: _Tensors, hidden_size: int, sizes: Sizes) -> None:
    if hidden_size != sizes.hidden_size:
        what = f"The heads read states of {hidden_size} numbers, and the target's have {sizes.hidden_size}."
        raise tensors.refuse(what, OTHER_TARGET)


def _same(found: Tensor, own: Tensor) -> bool:
    """Whether a repeated matrix is the target's, but for rounding to its dtype."""
    return found.shape == own.shape and torch.equal(found.to(own.dtype), own.to(found.dtype).to(own.dtype).cpu())


def _zeros(*size: int) -> Tensor:
    """Zeros of the narrowest dtype, so that `_of_one_dtype` gives them the others'."""
    return torch.zeros(size, dtype=torch.bool)


def _of_one_dtype(named: Mapping[str, Tensor], tensors: _Tensors) -> dict[str, Tensor]:
    """The tensors in the widest dtype among them."""
    dtype = torch.bool
    for name, tensor in named.items():
        if tensor.dtype not in (*READ, torch.bool):
            raise tensors.refuse(f"{name} is {tensor.dtype}".replace("torch.", "") + ".", f"Store it in {AS_READ}.")
        dtype = torch.promote_types(dtype, tensor.dtype)
    return {name: tensor.detach().to("cpu", dtype) for name, tensor in named.items()}
