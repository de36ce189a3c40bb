"""What `medusa-distill chat` talks to: an export with its target, loaded and warmed up."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pipeline.config import TargetConfig
from pipeline.conversations.chat_history import Chat
from pipeline.conversations.conversation import Message
from pipeline.conversations.template import ChatTemplate
from pipeline.conversations.text_stream import TextStream
from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.decoding.tree import Path as TreePath
from pipeline.decoding.tree import check_choices
from pipeline.errors import ConfigError, DataError
from pipeline.evaluation.native import load_exported_heads
from pipeline.evaluation.overhead import fastest_threads
from pipeline.export.layout import BACKBONE_DIRECTORY, CHOICES_FILE, read_config
from pipeline.targets.files import is_local
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import context_length, eos_token_ids, load_tokenizer, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GREETING = (Message("user", "Hello"),)
NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ChatModel:
    """A decoder, its tokenizer and its chat template; `described` in a line."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    described: str

    def new_chat(self, system: str | None, max_new_tokens: int) -> Chat:
        """An empty conversation whose prompts leave room for an answer: all of it, or half of a short context."""
        context = self.decoder.max_length
        return Chat(self.template, context - min(max_new_tokens, context // 2), system)

    def at_full_speed(self) -> AbstractContextManager[int]:
        """As many CPU threads as make plain steps fastest, while it lasts: the check decodes so too."""
        plain = plain_decoder(self.decoder.model, eos_token_ids=(), max_length=self.decoder.max_length)
        return fastest_threads(plain, self.template.opening(GREETING))

    def text_stream(self) -> TextStream:
        """For one answer."""
        return TextStream(self.tokenizer)

    def stream(self, prompt: list[int], max_new_tokens: int, rule: AcceptanceRule, seed: int) -> Generator[list[int]]:
        """The answer's ids, step by step."""
        generator = torch.Generator(self.decoder.device).manual_seed(seed) if rule.samples else None
        return self.decoder.stream(prompt, max_new_tokens, rule, generator)


def load_chat_model(
    export: Path, *, plain: bool, base_model: str | None, chat_template: str | None, gpus: int | None
) -> ChatModel:
    """The target that an export names with its heads and tree, or alone, ready to write at full speed.

    Raises:
        ConfigError: The target is not where the export says, or is not that of the heads; the tree is none.
        DataError: This is no export, or it is damaged.
        EnvironmentFault: The Hub or the GPU is not there.
    """
    config = read_config(export)
    gpus = min(1, torch.cuda.device_count()) if gpus is None else gpus
    base_model = base_model or _target_of(export, config.base_model_name_or_path)
    spec = resolve(TargetConfig(model=base_model, chat_template=chat_template), on_gpu=gpus > 0)
    tokenizer = load_tokenizer(spec)
    template = ChatTemplate(tokenizer, spec.chat_template)
    model = load_causal_lm(spec, "cuda" if gpus else "cpu", max(1, gpus))
    eos = {*eos_token_ids(spec), *template.end_of_turn_ids}
    if plain:
        decoder = plain_decoder(model, eos_token_ids=eos, max_length=context_length(spec))
        how = "without heads"
    else:
        heads = load_exported_heads(str(export)).to(input_device(model), model.dtype)
        choices = _choices(export, heads.shape.num_heads, config.vocab_size)
        decoder = Decoder(model, heads, choices, eos_token_ids=eos, max_length=context_length(spec))
        how = f"{decoder.tree.max_depth} heads, a tree of {len(choices)} nodes"
    decoder.generate(template.opening(GREETING), NUM_WARM_UP_TOKENS)
    return ChatModel(decoder, tokenizer, template, f"{spec.model}, {how}, {spec.dtype}, {decoder.device}")


def _target_of(export: Path, named: str) -> str:
    """The target as the export names it; a tuned backbone is the one beside its heads, wherever both were moved."""
    if is_local(named) and (export / BACKBONE_DIRECTORY).is_dir():
        return str(export / BACKBONE_DIRECTORY)
    if not is_local(named) or Path(named).is_dir():
        return named
    raise ConfigError(f"The export's target is not there: {named}.", str(export), "Say where it is with --base-model.")


def _choices(export: Path, num_heads: int, vocab_size: int) -> tuple[TreePath, ...]:
    path, fix = export / CHOICES_FILE, "Export again, or write a list of paths such as [[0], [0, 0], [1]]."
    try:
        choices = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"The export's tree cannot be read: {error}.", str(path), fix) from None
    if not isinstance(choices, list):
        raise DataError("The export's tree is not a list of paths.", str(path), fix)
    return check_choices(choices, num_heads, vocab_size)
