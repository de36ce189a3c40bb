"""A checkpoint of split heads, read by another number of workers: parts are put together and split anew.

Letters: V rows of a parameter, of which each of N parts has R.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from pipeline.errors import EnvironmentFault
from pipeline.training.sharded_heads import RowsOverWorkers

RowsOf = Callable[[str, Tensor], RowsOverWorkers | None]
"""How this worker holds a tensor, given its name and all of it; None: whole."""


def resplit(paths: Sequence[Path], rows_of: RowsOf) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a checkpoint as this worker holds them, and its state; one tensor at a time is whole.

    `rows` of the state says which tensors are split over the files, by how many rows they have together.

    Raises:
        EnvironmentFault: 8-bit moments have scales that more than one row shares.
    """
    tensors: dict[str, Tensor] = {}
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        state = json.loads(files[0].metadata()["state"])
        split = state.get("rows", {})
        for name in files[0].keys():  # noqa: SIM118  (not a dictionary)
            if name in split:
                whole = _joined([file.get_tensor(name) for file in files], split[name], paths[0])
            else:
                whole = files[0].get_tensor(name)
            rows = rows_of(name, whole)
            tensors[name] = whole if rows is None else _part(whole, rows, paths[0])
    return tensors, state


def _joined(parts: Sequence[Tensor], num_rows: int, path: Path) -> Tensor:
    """All rows: [..., V, D] of parts [..., R, D]; of one dimension, equally many numbers for each row."""
    rows_each = -(-num_rows // len(parts))
    matrices = [_by_row(part, rows_each, path) for part in parts]
    whole = torch.cat(matrices, -2)[..., :num_rows, :]
    return whole.flatten() if parts[0].dim() == 1 else whole


def _part(whole: Tensor, rows: RowsOverWorkers, path: Path) -> Tensor:
    part = rows.part(_by_row(whole, rows.num_rows, path))
    return part.flatten() if whole.dim() == 1 else part


def _by_row(tensor: Tensor, num_rows: int, path: Path) -> Tensor:
    if tensor.dim() > 1:
        return tensor
    if len(tensor) % num_rows:
        what = "A checkpoint of 8-bit moments cannot be continued by another number of workers at this width."
        fix = "Continue with as many workers as before (placement.train.workers), or start over with --fresh train."
        raise EnvironmentFault(what, str(path), fix)
    return tensor.unflatten(0, (num_rows, -1))
