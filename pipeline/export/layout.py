"""The layout of an export directory, and its `config.json`.

`config.json` names the target twice: for engines that are given both directories, and in vLLM's
speculators format, so that `vllm serve DIRECTORY` serves target and heads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.errors import ConfigError, DataError
from pipeline.heads.kind import Heads
from pipeline.heads.kinds import head_kind, shape_from_json
from pipeline.heads.shapes import FORMATS, ExportFormat, HeadsShape
from pipeline.targets.files import check_repo_id

CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
Content = dict[str, Any]  # content of a config.json, or vLLM's arguments
BACKBONE_DIRECTORY = "backbone"  # the tuned backbone, beside its heads

# vLLM's rejection sampler asserts at most 128 draft tokens (MAX_SPEC_LEN), one per head.
MAX_NUM_HEADS = 128


@dataclass(frozen=True)
class ExportLayout:
    """The layout of an export: the heads' shape, their target, the file format and the dtype.

    Attributes:
        base_model_name_or_path: The target: a Hub id or an absolute directory.
        format: One of `FORMATS`.
        num_speculative_tokens: How many tokens vLLM drafts per step; 0 stands for one per head.
        dynamic_tree: The tree of native decoding, instead of the static one in the choices file.

    Raises:
        ConfigError: No engine can load heads of this shape in this format, or the target's id is
            invalid.
    """

    base_model_name_or_path: str
    shape: HeadsShape
    format: str = "expanded"
    dtype: str = "float32"
    num_speculative_tokens: int = 0
    dynamic_tree: DynamicTree | None = None

    def __post_init__(self) -> None:
        num_heads = self.shape.num_heads
        num_tokens = self.num_speculative_tokens or num_heads
        object.__setattr__(self, "num_speculative_tokens", num_tokens)
        if not 1 <= num_heads <= MAX_NUM_HEADS:
            raise ConfigError(
                f"{num_heads} heads cannot be exported: vLLM drafts one token per head, at least 1"
                f" and at most {MAX_NUM_HEADS} (its rejection sampler's limit).",
                "train.num_heads",
                "The paper trains 5, and finds 3 or 4 enough.",
            )
        self.kind.check_format(self.shape, self.stored)
        if not os.path.isabs(self.base_model_name_or_path):
            check_repo_id(self.base_model_name_or_path, "target.model")

    @property
    def stored(self) -> ExportFormat:
        """The file format of the export."""
        return FORMATS[self.format]

    @property
    def kind(self) -> type[Heads]:
        """The kind of the exported heads."""
        return head_kind(self.shape.kind)

    def to_json(self, target: Mapping[str, Any]) -> Content:
        """Return the content of the export's config.json; `target` is the target's config.json."""
        num_tokens = self.num_speculative_tokens
        heads = {"format": self.format, "num_speculative_tokens": num_tokens}
        if self.dynamic_tree:
            heads["dynamic_tree"] = asdict(self.dynamic_tree)
        content = {
            **self.kind.engine_config(self.shape, self.stored, target),
            "hidden_size": self.shape.hidden_size,
            "vocab_size": self.shape.target_vocab_size,
            "dtype": self.dtype,
            "heads": {**heads, **self.shape.to_json()},  # for `read_layout`
        }
        method = self.kind.vllm_method
        refusal = self.kind.vllm_refusal(self.shape, target)
        if refusal is None:
            proposal = {"proposal_type": "greedy", "speculative_tokens": num_tokens}
            content["speculators_model_type"] = method
            content.setdefault("transformer_layer_config", {})
            content["speculators_config"] = {
                "algorithm": method,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"architectures": list(target.get("architectures") or ())},
            }
        return with_base_model(content, self.base_model_name_or_path)

    def engine_args(
        self, directory: str | os.PathLike[str], target: str, draft_tokens: int | None = None
    ) -> Content:
        """Return vLLM's arguments to serve a target with the export in `directory`.

        If the export names this target, and `draft_tokens` is None, the only argument is `model`,
        the export's directory. Otherwise (one of the two was moved, or the heads are served with
        another model) it is `speculative_config`, and the caller adds the target as `model`.

        Raises what `speculative_config` raises.
        """
        named = Path(self.base_model_name_or_path)
        if named.resolve() == Path(target).resolve() and draft_tokens is None:
            return {"model": str(Path(directory).resolve())}
        return {"speculative_config": self.speculative_config(directory, draft_tokens)}

    def speculative_config(
        self, directory: str | os.PathLike[str], draft_tokens: int | None = None
    ) -> Content:
        """Return vLLM's speculative configuration of the export in `directory`.

        Args:
            draft_tokens: The tokens to draft in a step; None for the number in the export.

        Raises:
            ConfigError: The heads cannot propose so many tokens.
        """
        number = draft_tokens or self.num_speculative_tokens
        most = self.shape.max_depth
        if number > most:
            raise ConfigError(
                f"These heads propose {most} tokens ahead, not {number}.",
                "--draft-tokens",
                f"Give at most {most}.",
            )
        return self.kind.speculative_config(str(Path(directory).resolve()), number)


def with_base_model(content: Mapping[str, Any], base_model: str) -> Content:
    """Return a copy of the content of an export's config.json that names another target."""
    replaced = {**content, "base_model_name_or_path": base_model}
    speculators = content.get("speculators_config")  # only if vLLM serves the heads
    if speculators:
        verifier = {**speculators["verifier"], "name_or_path": base_model}
        replaced["speculators_config"] = {**speculators, "verifier": verifier}
    return replaced


def read_layout(directory: str | os.PathLike[str]) -> ExportLayout:
    """Read the layout in an export's config.json.

    Raises:
        DataError: The file is missing, or was not written by this project.
    """
    path = Path(directory) / CONFIG_FILE
    fix = "Give the directory that the export stage wrote, RUN_DIR/latest/export, or export again."
    if not path.is_file():
        raise DataError(f"There is no {CONFIG_FILE}.", str(directory), fix)
    try:
        content = json.loads(path.read_bytes())
        heads = dict(content["heads"])
        format = heads.pop("format")
        num_tokens = heads.pop("num_speculative_tokens")
        tree = heads.pop("dynamic_tree", None)
        return ExportLayout(
            base_model_name_or_path=content["base_model_name_or_path"],
            shape=shape_from_json(heads),
            format=format,
            dtype=content["dtype"],
            num_speculative_tokens=num_tokens,
            dynamic_tree=DynamicTree(**tree) if tree else None,
        )
    except KeyError as error:
        raise DataError(
            f"This is not the configuration of an export: it has no {error}.", path, fix
        ) from error
    except (ConfigError, OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(
            f"This is not the configuration of an export ({type(error).__name__}: {error}).",
            path,
            fix,
        ) from error


def target_of(directory: str | os.PathLike[str]) -> str:
    """Return the target that an export names: a Hub id, a directory, or its own tuned backbone.

    Raises:
        ConfigError: The target is a local directory that does not exist.
        DataError: The directory is not an export.
    """
    named = read_layout(directory).base_model_name_or_path
    if not os.path.isabs(named):
        return named
    tuned = Path(directory, BACKBONE_DIRECTORY)
    if tuned.is_dir():
        return str(tuned)
    if not Path(named).is_dir():
        raise ConfigError(
            f"The export's target does not exist: {named}.",
            str(directory),
            "Pass the target with --base-model, or as `target=` in Python.",
        )
    return named


def check_vocabulary(shape: HeadsShape, target_vocab_size: int) -> None:
    """Raise DataError unless an export's heads and the target have the same vocabulary size."""
    if shape.target_vocab_size != target_vocab_size:
        raise DataError(
            f"The heads have a vocabulary of {shape.target_vocab_size} tokens; the target's lm_head"
            f" has {target_vocab_size}.",
            "vocab_size",
            "Train the heads on this target: a padded or resized vocabulary does not load in vLLM.",
        )
