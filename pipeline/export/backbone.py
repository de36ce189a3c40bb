"""The tuned backbone of Medusa-2 as a model directory that transformers and every engine load.

Tokenizer, chat template and generation settings are the target's. Weights are safetensors in shards
of at most 5 GB, embeddings are untied, and the directory is created by one rename. `backbone.json`
records its inputs without local paths.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.export.layout import CONFIG_FILE
from pipeline.storage.atomic import atomic_directory, remove, write_json
from pipeline.storage.receipts import Identity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKBONE_FILE = "backbone.json"  # the backbone's inputs
SHARD_SIZE = "5GB"
GENERATION_FILE = "generation_config.json"


def write_backbone(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    as_they_are: Iterable[Path],
    made_of: Identity,
) -> None:
    """Write a tuned backbone for export as a model directory; an existing one is deleted first.

    Resets `model.generation_config`.

    Args:
        tokenizer: Anything with `save_pretrained(directory)`, which also writes the chat template.
        as_they_are: Files of the target to copy: generation settings and modelling code.
        made_of: The backbone's inputs, for `backbone.json`.
    """
    from transformers import GenerationConfig

    remove(directory)
    # The target's generation settings are copied as a file: saving rejects some valid ones.
    model.generation_config = GenerationConfig()
    with atomic_directory(directory, last=CONFIG_FILE) as partial:
        model.save_pretrained(partial, max_shard_size=SHARD_SIZE)
        (partial / GENERATION_FILE).unlink(missing_ok=True)
        tokenizer.save_pretrained(partial)
        for file in as_they_are:
            shutil.copyfile(file, partial / file.name)
        write_json(partial / BACKBONE_FILE, made_of)


def link_backbone(source: Path, directory: Path, files: Iterable[str]) -> None:
    """Hard-link a tuned backbone's files into an export, or copy them if that fails.

    An existing `directory` is deleted first.

    Args:
        files: Paths relative to `source`.
    """
    remove(directory)
    with atomic_directory(directory, last=CONFIG_FILE) as partial:
        for file in files:
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / file, partial / file)
            except OSError:
                shutil.copy(source / file, partial / file)
