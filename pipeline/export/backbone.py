"""The tuned backbone of Medusa-2 as a model directory that transformers and every engine load.

Unchanged files are the target's own: tokenizer, chat template, generation settings. Weights are
safetensors in shards of at most 5 GB, embeddings are untied, and the directory is created by one
rename. `backbone.json` records its inputs without local paths.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.export.layout import CONFIG_FILE
from pipeline.storage.atomic import atomic_directory, files_in, read_json, remove

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BACKBONE_FILE = "backbone.json"  # its inputs
SHARD_SIZE = "5GB"
GENERATION_FILE = "generation_config.json"


def write_backbone(
    directory: Path,
    model: PreTrainedModel,
    tokenizer: Any,
    *,
    as_they_are: Iterable[Path],
    made_of: dict[str, Any],
) -> None:
    """Write the model in place of what is there.

    Args:
        directory: Created or replaced atomically.
        tokenizer: Anything with `save_pretrained(directory)`, its chat template included.
        as_they_are: Files of the target to copy: generation settings, its code.
        made_of: What `is_made_of` will compare.
    """
    from transformers import GenerationConfig

    remove(directory)
    model.generation_config = (
        GenerationConfig()
    )  # the target's is copied: saving refuses some that loading accepts
    with atomic_directory(directory, last=CONFIG_FILE) as partial:
        model.save_pretrained(partial, max_shard_size=SHARD_SIZE)
        (partial / GENERATION_FILE).unlink(missing_ok=True)
        tokenizer.save_pretrained(str(partial))
        for file in as_they_are:
            shutil.copyfile(file, partial / file.name)
        (partial / BACKBONE_FILE).write_text(json.dumps(made_of, indent=2) + "\n", encoding="utf-8")


def is_made_of(directory: Path, made_of: dict[str, Any]) -> bool:
    """Whether a complete backbone of these inputs exists."""
    return bool(read_json(directory / BACKBONE_FILE) == made_of)


def link_backbone(source: Path, directory: Path, files: Iterable[str]) -> list[Path]:
    """Copy these files of the backbone, by hard links where the file system has them; returns the
    copies.
    """
    remove(directory)
    with atomic_directory(directory, last=CONFIG_FILE) as partial:
        for file in files:
            (partial / file).parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source / file, partial / file)
            except OSError:
                shutil.copy(source / file, partial / file)
    return [directory / file for file in files_in(directory)]
