"""Load targets and exports in Python, ready to decode. See docs/python.md.

A tree is given as a list of paths (`[[0], [0, 0], [1]]`), as a JSON file with such a list, as a
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
from pipeline.storage.run_directory import export_of
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
    """Load a target model: weights, tokenizer and chat template.

    Args:
        model: A Hub id or a local directory.
        gpus: The number of GPUs that hold it; 0 is the CPU. By default 1 if there is a GPU, else 0.
        **settings: Other keys of the configuration's `target` section, such as `dtype`,
            `quantization` or `chat_template`.

    Raises:
        ConfigError: There is no such target, transformers cannot load it, or it cannot verify a
            tree.
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
    """A loaded target model, with tokenizer and chat template.

    Attributes:
        spec: Its name, revision, dtype and other settings.
        model: A causal LM of transformers, frozen and in evaluation mode.
    """

    spec: TargetSpec
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer of this target."""
        return frozenset(self.template.stop_ids("assistant", eos_token_ids(self.spec)))

    def prompt(self, messages: str | Sequence[Mapping[str, str]]) -> list[int]:
        """Tokenize a question as a chat prompt, with the target's chat template.

        Args:
            messages: A question, or a conversation that ends with a question, as a list of messages
                with `role` and `content`.

        Returns:
            Token ids.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.template.opening([Message(**message) for message in messages])  # type: ignore[arg-type]

    def text(self, token_ids: Sequence[int]) -> str:
        """Decode token ids to text, without special tokens."""
        return self.template.decode(token_ids)

    def stream_text(self, steps: Iterable[Sequence[int]]) -> Iterator[str]:
        """Yield the text that each step of `Decoder.stream` completes.

        A character that a step leaves incomplete is yielded with a later step. The last item is the
        rest of the text, often empty.
        """
        stream = TextStream(self.tokenizer)
        for new_ids in steps:
            yield "".join(map(stream.push, new_ids))
        yield stream.flush()

    def decoder(self, heads: Heads | None = None, tree: GivenTree = ()) -> Decoder:
        """Create a decoder of this target: with heads and a tree, or for plain decoding.

        Args:
            heads: None for plain decoding. They are moved, in place, to the target's device and
                dtype.
            tree: Required with heads, ignored without them.

        Raises:
            ConfigError: The heads are not this target's, the tree is empty or asks for more than
                they guess, or the target's attention takes no tree mask.
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
    """Load an export's heads on the CPU.

    Matrices that the export leaves out are taken from the target.

    Raises:
        DataError: The directory is not an export, or is damaged.
    """
    return read_heads(export, target.model)


def load_tree(source: GivenTree) -> tuple[TreePath, ...] | DynamicTree:
    """Return a tree, given directly or as a file, as paths or as a `DynamicTree`.

    A file holds a list of paths in JSON, or is a run's tree.json. Paths are not checked to form a
    tree.

    Raises:
        DataError: The file cannot be read, or holds no tree.
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
    """Load an export and its target, ready to decode.

    Args:
        export: A run's directory, its `latest/export`, or a copy of that.
        target: A loaded target, a Hub id or a directory; by default the target that the export
            names.
        tree: A tree to use instead of the export's.
        **settings: Arguments of `load_target`, such as `gpus`, for a target that is not loaded yet.

    Raises:
        ConfigError: There is no such directory, or the run has no export yet. The target does not
            exist or is not the heads' target, the tree does not fit the heads, or settings are
            given for a loaded target.
        DataError: The directory is not an export or is damaged, or the tree's file cannot be read.
        EnvironmentFault: As in `load_target`.
    """
    export = export_of(Path(export))
    chosen = tree or read_tree(export)
    if not isinstance(target, Target):
        target = load_target(target or target_of(export), **settings)
    elif settings:
        raise ConfigError(
            f"The target is loaded already, without {', '.join(settings)}.",
            "target",
            "Pass these settings to load_target, or pass the target's name to load_export.",
        )
    heads = load_heads(export, target)
    return Export(export, target, heads, target.decoder(heads, chosen))


@dataclass(frozen=True)
class Export:
    """A loaded export: target, heads, and a decoder with both."""

    path: Path
    target: Target
    heads: Heads
    decoder: Decoder
