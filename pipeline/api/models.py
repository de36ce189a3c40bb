"""Targets and exports from Python, ready to decode. See docs/python.md.

A tree is given as a list of paths (`[[0], [0, 0], [1]]`), as a file with such a list in JSON, as a
run's tree.json, or as a `DynamicTree`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.artifacts.tree_file import read_tree as read_tree_file
from pipeline.config import TargetConfig
from pipeline.conversations.conversation import Message
from pipeline.conversations.requests import TextStream
from pipeline.conversations.template import ChatTemplate
from pipeline.decoding.decoder import Decoder
from pipeline.decoding.dynamic_tree import DynamicTree, check_tree
from pipeline.decoding.tree import TreePath
from pipeline.errors import ConfigError
from pipeline.export.directory import read_heads, read_tree
from pipeline.export.layout import target_of
from pipeline.heads.kind import Heads
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import (
    TargetSpec,
    context_length,
    eos_token_ids,
    load_chat_template,
    load_tokenizer,
    resolve,
)

GivenTree = str | Path | Iterable[Sequence[int]] | DynamicTree


def load_target(model: str | Path, *, gpus: int | None = None, **settings: Any) -> Target:
    """Load a target model into Python: weights, tokenizer and chat template.

    Args:
        model: A Hub id or a local directory.
        gpus: How many GPUs hold it; by default one where there is one, else the CPU.
        **settings: Other keys of the configuration's `target` section, such as `dtype`,
            `quantization` or `chat_template`.

    Raises:
        ConfigError: There is no such target, or it cannot verify a tree.
        EnvironmentFault: The Hub cannot be reached, or a GPU is missing or too small.
    """
    if gpus is None:
        gpus = min(1, torch.cuda.device_count())
    spec = resolve(TargetConfig(model=str(model), **settings), on_gpu=gpus > 0)
    tokenizer = load_tokenizer(spec)
    template = load_chat_template(spec, tokenizer)
    weights = load_causal_lm(spec, "cuda" if gpus else "cpu", max(1, gpus))
    return Target(spec, weights, tokenizer, template)


@dataclass(frozen=True)
class Target:
    """A target model loaded into Python, with tokenizer and chat template.

    Attributes:
        spec: What it is: name, revision, dtype.
        model: A causal LM of transformers, frozen and in evaluation mode.
    """

    spec: TargetSpec
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer of this target, for the Python API."""
        return frozenset({*eos_token_ids(self.spec), *self.template.end_ids["assistant"]})

    def prompt(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Tokenize a Python user's question, or a history that ends with one, as a chat prompt."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.template.opening([Message(**message) for message in messages])  # type: ignore[arg-type]

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode token ids to text for a Python user, without special tokens."""
        return self.template.decode(token_ids)

    def stream_text(self, steps: Iterable[Sequence[int]]) -> Iterator[str]:
        """Yield for a Python user the text that each step of `Decoder.stream` adds.

        The text consists of whole characters.
        """
        stream = TextStream(self.tokenizer)
        for new_ids in steps:
            yield "".join(map(stream.push, new_ids))
        yield stream.flush()

    def decoder(self, heads: Heads | None = None, tree: GivenTree = ()) -> Decoder:
        """Create a decoder of this target; it decodes plainly unless heads and a tree are given.

        Raises:
            ConfigError: The heads are not this target's, the tree asks for more than they guess, or
                the target's attention takes no tree mask.
            DataError: The tree's file cannot be read, or holds no tree.
        """
        chosen: tuple[TreePath, ...] | DynamicTree = ()
        if heads is not None:
            heads = heads.to(input_device(self.model), self.model.dtype)
            chosen = check_tree(load_tree(tree), heads.shape.max_depth, heads.shape.vocab_size)
        return Decoder(
            self.model,
            heads,
            chosen,
            eos_token_ids=self.eos_token_ids,
            max_length=context_length(self.spec),
        )


def load_heads(export: str | Path, target: Target) -> Heads:
    """Load into Python the heads of an export, on the CPU; shared matrices are the target's.

    Raises:
        DataError: This is no export, or it is damaged.
    """
    return read_heads(export, target.model)


def load_tree(source: GivenTree) -> tuple[TreePath, ...] | DynamicTree:
    """Convert the tree that a Python user gives: paths, a file of paths, or a `DynamicTree`.

    A file holds a list of paths in JSON, or is a run's tree.json.

    Raises:
        DataError: The file cannot be read, or holds no list of paths.
    """
    if isinstance(source, str | Path):
        return read_tree_file(Path(source))
    if isinstance(source, DynamicTree):
        return source
    return tuple(map(tuple, source))


def load_export(
    export: str | Path,
    *,
    target: Target | str | Path | None = None,
    tree: GivenTree | None = None,
    **settings: Any,
) -> Export:
    """Load into Python an export and its target, ready to decode.

    Args:
        export: `RUN_DIR/latest/export`, or a copy of it.
        target: A loaded target, or where it is; by default the one that the export names.
        tree: Another tree than the export's.
        **settings: Those of `load_target`, such as `gpus`, for a target that is not loaded yet.

    Raises:
        ConfigError: The target is not where the export says, or is not that of the heads; or it is
            loaded already, and settings are given that it would have to be loaded with.
        DataError: This is no export, or it is damaged.
    """
    chosen = tree or read_tree(export)
    if not isinstance(target, Target):
        target = load_target(target or target_of(export), **settings)
    elif settings:
        raise ConfigError(
            f"The target is loaded already, without {', '.join(settings)}.",
            "target",
            "Give them to load_target, or give load_export the target's name.",
        )
    heads = load_heads(export, target)
    return Export(Path(export), target, heads, target.decoder(heads, chosen))


@dataclass(frozen=True)
class Export:
    """An export loaded into Python: target, heads, and a decoder of both."""

    path: Path
    target: Target
    heads: Heads
    decoder: Decoder
