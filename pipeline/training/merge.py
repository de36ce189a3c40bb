"""The end of Medusa-2's training: the target and its adapter become one model on disk, beside the heads."""

from __future__ import annotations

from pathlib import Path

from pipeline.export.backbone import GENERATION_FILE, is_made_of, write_backbone
from pipeline.export.layout import BACKBONE_DIRECTORY
from pipeline.storage.atomic import disk_errors
from pipeline.storage.checksums import FileFacts
from pipeline.targets.files import find_file, is_local
from pipeline.targets.lora import load_tuned
from pipeline.targets.spec import TargetSpec, load_tokenizer

ADAPTER_DIRECTORY = "adapter"
ADAPTER_FILE = "adapter_model.safetensors"


def merge_backbone(target: TargetSpec, directory: str) -> None:
    """Write `backbone/` from the target and `adapter/` in a train stage's directory, unless it is there already.

    On the CPU; see `load_tuned` for what it takes of memory.

    Raises:
        ConfigError, DataError: As `load_tuned` does.
        EnvironmentFault: The disk is full.
    """
    adapter, backbone = Path(directory, ADAPTER_DIRECTORY), Path(directory, BACKBONE_DIRECTORY)
    made_of = {
        "method": "medusa-2",
        "base_model": None if is_local(target.model) else target.model,
        "revision": target.revision,
        "dtype": target.dtype,
        "adapter_sha256": FileFacts.of(adapter / ADAPTER_FILE).sha256,
    }
    if is_made_of(backbone, made_of):
        return
    tokenizer = load_tokenizer(target)
    tokenizer.chat_template = target.chat_template or tokenizer.chat_template
    with disk_errors(backbone):
        model = load_tuned(target, adapter)
        write_backbone(backbone, model, tokenizer, as_they_are=_own_files(target), made_of=made_of)


def _own_files(target: TargetSpec) -> list[Path]:
    """What of a target is copied as it is: its generation settings, and code that lies beside local weights."""
    settings = find_file(target.model, target.revision, GENERATION_FILE)
    code = sorted(Path(target.model).glob("*.py")) if target.trust_remote_code and is_local(target.model) else []
    return [*([settings] if settings else []), *code]
