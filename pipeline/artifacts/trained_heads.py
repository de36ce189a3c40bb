"""The train stage's heads on disk: `heads.safetensors`, written atomically.

The header states the heads' kind and shape. The training's summary is in `summary.jsonl` beside it.
Like every log, this file is not part of the stage's content: if heads are trained again and come
out equal, later stages stay current although the timings in the summary differ.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pipeline.errors import DataError
from pipeline.heads.kind import Heads
from pipeline.heads.kinds import head_kind, shape_from_json
from pipeline.heads.shapes import HeadsShape
from pipeline.storage.atomic import atomic_path, read_json, write_text
from pipeline.storage.receipts import Summary

HEADS_FILE = "heads.safetensors"
SUMMARY_FILE = "summary.jsonl"


def write_heads(path: Path, heads: Heads, summary: Summary) -> None:
    """Write the summary of a training to `summary.jsonl`, then the heads to `path`."""
    write_text(path.with_name(SUMMARY_FILE), json.dumps(summary) + "\n")
    with atomic_path(path) as temporary:
        tensors = {}
        for name, tensor in heads.stored_tensors().items():
            # A copy, since safetensors refuses one tensor by two names.
            tensors[name] = tensor.cpu().clone(memory_format=torch.contiguous_format)
        save_file(tensors, temporary, {"heads": json.dumps(heads.shape.to_json())})


def read_trained_heads(path: Path) -> Heads:
    """Read trained heads from their file onto the CPU.

    Raises:
        DataError: The file is missing or damaged.
    """
    shape = _heads_shape(path)
    if shape is None:
        raise DataError(
            "There are no trained heads here, or they are damaged.",
            path,
            "Run again with --fresh train.",
        )
    return head_kind(shape.kind).from_named_tensors(shape, load_file(path), where=str(path))


def read_summary(path: Path, shape: HeadsShape) -> Summary | None:
    """Read the summary beside a heads file of this shape; None if one of the two is unreadable."""
    if _heads_shape(path) != shape:
        return None
    return read_json(path.with_name(SUMMARY_FILE))


def _heads_shape(path: Path) -> HeadsShape | None:
    """Read the shape in a heads file's header; None if it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return shape_from_json(json.loads(file.metadata()["heads"]))
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
