"""Trained heads: `heads.safetensors`, the end of a training, whole or absent; nothing is ever
unpickled.

Its header gives the heads' kind and shape. What training says of them, timings included, lies
beside it in `summary.jsonl`, a log: equal heads are equal files, and nothing that is made from them
is stale.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipeline.errors import DataError
from pipeline.heads.kind import Heads
from pipeline.heads.kinds import head_kind, shape_from_json
from pipeline.heads.shapes import HeadsShape
from pipeline.storage.atomic import atomic_path, read_json, write_text
from pipeline.storage.done import Summary

HEADS_FILE = "heads.safetensors"
SUMMARY_FILE = "summary.jsonl"


def write_heads(path: Path, heads: Heads, summary: Summary) -> None:
    """Write trained heads, after their summary."""
    write_text(path.with_name(SUMMARY_FILE), json.dumps(summary) + "\n")
    with atomic_path(path) as temporary:
        tensors: dict[str, Tensor] = {}
        for name, view in heads.stored_tensors().items():
            held = {
                tensor.data_ptr() for tensor in tensors.values()
            }  # safetensors refuses one tensor by two names
            tensors[name] = (
                view.cpu().contiguous().clone()
                if view.data_ptr() in held
                else view.cpu().contiguous()
            )
        save_file(tensors, temporary, {"heads": json.dumps(heads.shape.to_json())})


def read_trained_heads(path: Path) -> Heads:
    """Trained heads, on the CPU.

    Raises:
        DataError: There are none, or the file is damaged.
    """
    if (shape := _heads_shape(path)) is None:
        fix = "Run again with --fresh train."
        raise DataError("There are no trained heads here, or they are damaged.", str(path), fix)
    return head_kind(shape.kind).from_named_tensors(shape, load_file(path), where=str(path))


def read_summary(path: Path, shape: HeadsShape) -> Summary | None:
    """What training said of the heads in this file; None where there are none yet, or they are
    damaged.

    Raises:
        DataError: They have another kind or shape than `shape`, so they are another training's.
    """
    if (found := _heads_shape(path)) is None:
        return None
    if found != shape:
        what = f"The heads here have {found.described()}; this training's have {shape.described()}."
        raise DataError(what, str(path), "Move them elsewhere, or run again with --fresh train.")
    return read_json(path.with_name(SUMMARY_FILE))


def _heads_shape(path: Path) -> HeadsShape | None:
    """The shape that the file's header gives; None where the file is absent, damaged, or of another
    writer.
    """
    with (
        contextlib.suppress(OSError, SafetensorError, KeyError, TypeError, ValueError),
        safe_open(path, "pt") as file,
    ):
        return shape_from_json(json.loads(file.metadata()["heads"]))
    return None
