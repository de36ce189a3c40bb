"""The layout of an export directory, and its `config.json`, written and read.

`config.json` names the target twice: for engines that are given both directories, and in vLLM's
speculators format, so that `vllm serve DIRECTORY` alone serves target and heads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import DTYPES
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.errors import ConfigError, DataError
from pipeline.heads.export_format import ExportFormat, export_format
from pipeline.heads.kind import Heads
from pipeline.heads.shape import HeadsShape, head_kind
from pipeline.targets.files import check_repo_id

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
BACKBONE_DIRECTORY = "backbone"  # the tuned backbone, beside its heads

# vLLM's rejection sampler asserts at most 128 draft tokens (MAX_SPEC_LEN), one per head.
MAX_NUM_HEADS = 128


@dataclass(frozen=True)
class ExportLayout:
    """The heads' kind and shape, their target, and their layout on disk.

    `format` is the name of one of `FORMATS`. `num_speculative_tokens` is
    what an engine drafts per step; 0 stands for all the heads. With a `dynamic_tree` native
    decoding does not use the static one of the choices file. Raises ConfigError for settings that
    no engine or file supports.
    """

    base_model_name_or_path: str
    shape: HeadsShape
    format: str = "expanded"
    dtype: str = "float32"
    num_speculative_tokens: int = 0
    dynamic_tree: DynamicTree | None = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "num_speculative_tokens", self.num_speculative_tokens or self.shape.num_heads
        )
        check_num_heads(self.shape.num_heads)
        if self.dtype not in DTYPES:
            fix = f"Use one of {', '.join(DTYPES)}."
            raise ConfigError(f'Unknown dtype "{self.dtype}".', "export.dtype", fix)
        self.kind.check_format(self.shape, self.stored)
        if not os.path.isabs(self.base_model_name_or_path):
            check_repo_id(self.base_model_name_or_path, "target.model")

    @property
    def stored(self) -> ExportFormat:
        return export_format(self.format)

    @property
    def weights_file(self) -> str:
        return self.stored.weights_file or self.kind.weights_file

    @property
    def kind(self) -> type[Heads]:
        return head_kind(self.shape.kind)

    def to_json(self, target: Mapping[str, Any]) -> dict[str, Any]:
        """The content of `config.json`, for a target with this config.json."""
        method, num_tokens = self.kind.vllm_method, self.num_speculative_tokens
        content = {
            **self.kind.engine_config(self.shape, self.stored, target),
            "hidden_size": self.shape.hidden_size,
            "vocab_size": self.shape.target_vocab_size,
            "dtype": self.dtype,
            "heads": {  # what `read_layout` reads
                "format": self.format,
                "num_speculative_tokens": num_tokens,
                **({"dynamic_tree": self.dynamic_tree.to_json()} if self.dynamic_tree else {}),
                **self.shape.to_json(),
            },
        }
        if method and self.stored.at_root and not self.kind.not_served(self.shape, target):
            content |= {
                "speculators_model_type": method,
                "transformer_layer_config": {},
                "speculators_config": {
                    "algorithm": method,
                    "default_proposal_method": "greedy",
                    "proposal_methods": [
                        {"proposal_type": "greedy", "speculative_tokens": num_tokens}
                    ],
                    "verifier": {"architectures": list(target.get("architectures") or ())},
                },
            }
        return with_base_model(content, self.base_model_name_or_path)

    def engine_args(self, directory: str | os.PathLike[str], target: str) -> dict[str, Any]:
        """The arguments that start vLLM with this target and the heads of `directory`.

        The export alone where it names the target, as `vllm serve DIRECTORY` has it; else the two
        apart: of an export or a target that was moved, and where the heads are served with another
        model than their own.
        """
        export, named = str(Path(directory).resolve()), self.base_model_name_or_path
        if named == target or (
            os.path.isabs(named) and Path(named).resolve() == Path(target).resolve()
        ):
            return {"model": export}
        return {
            "speculative_config": self.kind.speculative_config(export, self.num_speculative_tokens)
        }


def with_base_model(content: Mapping[str, Any], base_model: str) -> dict[str, Any]:
    """The content of a `config.json`, with the target replaced."""
    replaced = {**content, "base_model_name_or_path": base_model}
    if speculators := content.get("speculators_config"):  # only heads that vLLM serves have one
        verifier = {**speculators["verifier"], "name_or_path": base_model}
        replaced["speculators_config"] = {**speculators, "verifier": verifier}
    return replaced


def read_json_config(directory: str | os.PathLike[str]) -> tuple[dict[str, Any], ExportLayout]:
    """The content of an export's `config.json`, and its parsed form.

    Raises:
        DataError: It is missing, or was not written by this project.
    """
    path = Path(directory) / CONFIG_FILE
    try:
        content = json.loads(path.read_bytes())
        heads = dict(content["heads"])
        format, num_tokens = heads.pop("format"), heads.pop("num_speculative_tokens")
        tree = DynamicTree(**heads.pop("dynamic_tree")) if "dynamic_tree" in heads else None
        base_model, dtype = content["base_model_name_or_path"], content["dtype"]
        return content, ExportLayout(
            base_model, HeadsShape.from_json(heads), format, dtype, num_tokens, tree
        )
    except (FileNotFoundError, NotADirectoryError) as error:
        fix = "Give the directory that the export stage wrote."
        raise DataError(f"There is no {CONFIG_FILE}.", str(directory), fix) from error
    except (ConfigError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"This is not the configuration of an export ({type(error).__name__}: {error})."
        fix = "Give the directory that the export stage wrote, or export again."
        raise DataError(what, str(path), fix) from error


def read_layout(directory: str | os.PathLike[str]) -> ExportLayout:
    """An export's parsed `config.json`; DataError as in `read_json_config`."""
    return read_json_config(directory)[1]


def target_of(directory: str | os.PathLike[str]) -> str:
    """The target of an export; a tuned backbone is found beside its heads, also after a move.

    Raises:
        ConfigError: It is a local directory that does not exist.
    """
    directory, named = Path(directory), read_layout(directory).base_model_name_or_path
    if os.path.isabs(named) and (directory / BACKBONE_DIRECTORY).is_dir():
        return str(directory / BACKBONE_DIRECTORY)
    if os.path.isabs(named) and not Path(named).is_dir():
        fix = "Say where it is with --base-model, or `target=`."
        raise ConfigError(f"The export's target is not there: {named}.", str(directory), fix)
    return named


def check_num_heads(num_heads: int) -> None:
    """Raise ConfigError for fewer than 1 head, or more than vLLM can draft with (128)."""
    if not 1 <= num_heads <= MAX_NUM_HEADS:
        raise ConfigError(
            f"{num_heads} heads cannot be exported: vLLM drafts one token per head, at least 1 and"
            f" at most {MAX_NUM_HEADS} (its rejection sampler's limit).",
            "train.num_heads",
            "The paper trains 5, and finds 3 or 4 enough.",
        )


def check_formats(kind: type[Heads], shape: Any, names: Sequence[str]) -> None:
    """ConfigError unless such heads can be exported in these formats, of which the first is what
    the check decodes.
    """
    for name in names:
        kind.check_format(shape, export_format(name))
    if not export_format(names[0]).at_root:
        what = f"The {names[0]} format is read by one engine alone, and the check decodes another."
        raise ConfigError(
            what, "export.formats", f"Begin with another: [expanded, {', '.join(names)}]."
        )


def check_vocabulary(shape: HeadsShape, target_vocab_size: int) -> None:
    """Raise DataError for heads of a target with another vocabulary."""
    if shape.target_vocab_size != target_vocab_size:
        raise DataError(
            f"The heads are of a vocabulary of {shape.target_vocab_size} tokens, and the target's"
            f" lm_head has {target_vocab_size}.",
            "vocab_size",
            "Train the heads on this very target: a padded or resized vocabulary does not load in"
            " vLLM.",
        )
