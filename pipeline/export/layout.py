"""What lies in an export directory, and the settings that decide it; no tensors, nothing heavy.

The names, shapes and keys are the common ground of vLLM 0.32, TGI and TensorRT-LLM:

- vLLM folds every key that contains "num" and "heads" into one number (likewise "layers"), so each such key holds the
  same number and none of the target's own are copied. Without `medusa_fc_bias` it drops the biases.
- TGI starts Medusa when it sees `medusa_num_heads`, and forgets it again at the sight of an `architectures` key.
- TensorRT-LLM reads `medusa_num_*` or `num_medusa_*`, depending on its version and entry point.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from pipeline.errors import ConfigError, DataError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "medusa_lm_head.safetensors"
CHOICES_FILE = "medusa_choices.json"
CARD_FILE = "README.md"
BACKBONE_DIRECTORY = "backbone"  # beside the heads of Medusa-2: the model that they belong to
BACKBONE_FILE = "medusa_backbone.json"  # in it: what it was made of
HEADS_SUFFIX = "-medusa"  # on the Hub: the heads of the tuned backbone NAME are NAME-medusa

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
DTYPES = ("float32", "bfloat16", "float16")

# vLLM's rejection sampler asserts at most 128 drafted tokens (MAX_SPEC_LEN), and it drafts one per head.
MAX_NUM_HEADS = 128

Format = Literal["expanded", "shared"]


@dataclass(frozen=True)
class ExportConfig:
    """The shape of the heads, the target that they belong to, and how they are laid out on disk.

    `vocab_size` and `hidden_size` are the target's. `format` "expanded" stores one lm_head per head, which every engine
    loads; "shared" stores the one lm_head of tied heads once, which vLLM and (with one block) TGI load.
    Raises ConfigError for what no engine, or no file, can carry.
    """

    base_model_name_or_path: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int = 1
    tied: bool = False
    format: Format = "expanded"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_num_heads(self.num_heads)
        if self.num_layers < 1:
            raise ConfigError(
                f"A head of {self.num_layers} residual blocks cannot be exported.",
                "train.medusa.num_layers",
                "Use at least 1: without a block every head is the same linear map of the target's state.",
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f'Unknown dtype "{self.dtype}".', "export.dtype", f"Use one of {', '.join(DTYPES)}.")
        if self.format == "shared" and not self.tied:
            raise ConfigError(
                "The shared format stores one lm_head for all heads, and these heads have one each.",
                "export.formats",
                "Train with `train.medusa.lm_head: tied`, or export with `formats: [expanded]`.",
            )
        if not is_local(self.base_model_name_or_path):
            check_repo_id(self.base_model_name_or_path, "target.model")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the weights file, by name: exactly these, in this order."""
        blocks: dict[str, tuple[int, ...]] = {}
        for block in (f"{k}.{layer}.linear" for k in range(self.num_heads) for layer in range(self.num_layers)):
            blocks[f"{block}.weight"] = (self.hidden_size, self.hidden_size)
            blocks[f"{block}.bias"] = (self.hidden_size,)
        num_stored = 1 if self.format == "shared" else self.num_heads
        return blocks | {name: (self.vocab_size, self.hidden_size) for name in self.lm_head_names()[:num_stored]}

    def lm_head_names(self) -> list[str]:
        """The name of every head's lm_head, stored or not; the first is always stored."""
        return [f"{k}.{self.num_layers}.weight" for k in range(self.num_heads)]

    def to_json(self) -> dict[str, Any]:
        """The content of `config.json`."""
        return {
            "model_type": "medusa",
            "base_model_name_or_path": self.base_model_name_or_path,
            "hidden_size": self.hidden_size,
            "vocab_size": self.vocab_size,
            "medusa_num_heads": self.num_heads,
            "medusa_num_layers": self.num_layers,
            "num_medusa_heads": self.num_heads,
            "num_medusa_layers": self.num_layers,
            "medusa_fc_bias": True,
            "medusa_tied_lm_head": self.tied,
            **({"original_lm_head": True} if self.format == "shared" else {}),
            "dtype": self.dtype,
        }


def read_config(directory: str | os.PathLike[str]) -> ExportConfig:
    """The settings of an export directory; DataError where `config.json` is missing or is not one that we wrote."""
    path = Path(directory) / CONFIG_FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return ExportConfig(
            base_model_name_or_path=raw["base_model_name_or_path"],
            hidden_size=raw["hidden_size"],
            vocab_size=raw["vocab_size"],
            num_heads=raw["medusa_num_heads"],
            num_layers=raw["medusa_num_layers"],
            tied=raw["medusa_tied_lm_head"],
            format="shared" if raw.get("original_lm_head") else "expanded",
            dtype=raw["dtype"],
        )
    except FileNotFoundError as error:
        raise DataError(
            f"There is no {CONFIG_FILE}.", str(directory), "Give the directory that the export stage wrote."
        ) from error
    except (ConfigError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"This is not the configuration of an export ({type(error).__name__}: {error}).",
            str(path),
            "Give the directory that the export stage wrote, or export again.",
        ) from error


def check_num_heads(num_heads: int) -> None:
    """Refuse a head count that the export cannot carry: fewer than 1, or more than vLLM can draft (128)."""
    if not 1 <= num_heads <= MAX_NUM_HEADS:
        raise ConfigError(
            f"{num_heads} heads cannot be exported: vLLM drafts one token per head, at least 1 and at most "
            f"{MAX_NUM_HEADS} (its rejection sampler's limit).",
            "train.num_heads",
            "The paper trains 5, and finds 3 or 4 enough.",
        )


def check_vocabulary(heads_vocab_size: int, target_vocab_size: int) -> None:
    """Refuse heads that predict another vocabulary than the target's."""
    if heads_vocab_size != target_vocab_size:
        raise DataError(
            f"The heads predict a vocabulary of {heads_vocab_size} tokens, and the target's lm_head has "
            f"{target_vocab_size}.",
            "vocab_size",
            "Train the heads on this very target: a padded, resized or pruned vocabulary does not load in vLLM.",
        )


def repositories(repo_id: str | None, *, tuned: bool) -> tuple[str | None, str | None]:
    """Where the heads go on the Hub, and where a tuned backbone does: `repo_id`, whose heads have a name after its."""
    if repo_id is None or not tuned:
        return repo_id, None
    return repo_id + HEADS_SUFFIX, repo_id


def is_local(base_model: str) -> bool:
    """Whether a base model is a directory on this machine: an absolute path, as opposed to a Hub id."""
    return os.path.isabs(base_model)


def check_repo_id(repo_id: str, where: str, *, with_owner: bool = False) -> None:
    """Refuse what is not a Hub id; `with_owner` wants USER/NAME, since a bare NAME is nobody's."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(
            f'"{repo_id}" is neither a Hub id nor an absolute path.', where, "Write a Hub id as USER/NAME."
        ) from error
    if with_owner and "/" not in repo_id:
        raise ConfigError(f'"{repo_id}" does not say whose repository it is.', where, "Write it as USER/NAME.")
