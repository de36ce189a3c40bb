"""Trained heads: `heads.safetensors`, the end of a training, whole or absent; nothing is ever unpickled.

Its header gives the heads' shape. What training says of them, timings included, lies beside it in `summary.jsonl`, a
log: equal heads are equal files, and nothing that is made from them is stale.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pipeline.errors import DataError
from pipeline.heads.medusa import HeadsConfig, MedusaHeads, from_named_tensors, to_named_tensors
from pipeline.storage.atomic import atomic_path, read_json, write_text

HEADS_FILE = "heads.safetensors"
SUMMARY_FILE = "summary.jsonl"


def write_heads(path: Path, heads: MedusaHeads, summary: dict[str, Any]) -> None:
    """Write trained heads under the names that engines read (`{k}.{l}.linear.weight`, …), after their summary.

    Tied heads keep their one lm_head single, as `0.{L}.weight`.
    """
    write_text(path.with_name(SUMMARY_FILE), json.dumps(summary) + "\n")
    with atomic_path(path) as temporary:
        tensors = {n: view.cpu().contiguous() for n, view in to_named_tensors(heads, expand_tied=False).items()}
        save_file(tensors, temporary, {"heads": json.dumps(asdict(heads.config))})


def load_heads(path: Path) -> MedusaHeads:
    """Trained heads, on the CPU.

    Raises:
        DataError: There are none, or the file is damaged.
    """
    if (config := _heads_config(path)) is None:
        fix = "Run again with --fresh train."
        raise DataError("There are no trained heads here, or they are damaged.", str(path), fix)
    return from_named_tensors(config, load_file(path), where=str(path))


def read_summary(path: Path, config: HeadsConfig) -> dict[str, Any] | None:
    """What training said of the heads in this file; None where there are none yet, or they are damaged.

    Raises:
        DataError: They have another shape than `config`, so they are another training's.
    """
    if (found := _heads_config(path)) is None:
        return None
    if found != config:
        what = f"The heads here have {_described(found)}; this training's have {_described(config)}."
        raise DataError(what, str(path), "Move them elsewhere, or run again with --fresh train.")
    return read_json(path.with_name(SUMMARY_FILE))


def _described(config: HeadsConfig) -> str:
    heads = f"{config.num_heads} {'tied' if config.tied else 'untied'} lm_heads, {config.num_layers} block(s) each"
    return f"{heads}, a hidden size of {config.hidden_size} and a vocabulary of {config.vocab_size}"


def _heads_config(path: Path) -> HeadsConfig | None:
    """The shape that the file's header gives; None where the file is absent, damaged, or of another writer."""
    with contextlib.suppress(OSError, SafetensorError, KeyError, TypeError, ValueError), safe_open(path, "pt") as file:
        return HeadsConfig(**json.loads(file.metadata()["heads"]))
    return None
