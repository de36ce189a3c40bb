"""The model behind `medusa-distill chat`: an export with its target, loaded and warmed up."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.api.models import Target, load_export, load_target
from pipeline.conversations.requests import TextStream
from pipeline.conversations.row_builder import Chat
from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.decoder import Decoder, plain_decoder
from pipeline.evaluation.overhead import fastest_threads
from pipeline.export.layout import target_of

GREETING = "Hello"
NUM_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class ChatModel:
    """A target and its decoder; `described` is a one-line description."""

    target: Target
    decoder: Decoder
    described: str

    def new_chat(self, system: str | None, max_new_tokens: int) -> Chat:
        """An empty conversation whose prompts leave room for an answer, at most half of the
        context.
        """
        context = self.decoder.max_length
        return Chat(self.target.template, context - min(max_new_tokens, context // 2), system)

    def at_full_speed(self) -> AbstractContextManager[int]:
        """Use the number of CPU threads at which plain steps are fastest, as the check does."""
        plain = plain_decoder(
            self.decoder.model, eos_token_ids=(), max_length=self.decoder.max_length
        )
        return fastest_threads(plain, self.target.prompt(GREETING))

    def text_stream(self) -> TextStream:
        return TextStream(self.target.tokenizer)

    def stream(
        self, prompt: list[int], max_new_tokens: int, rule: AcceptanceRule, seed: int
    ) -> Generator[list[int]]:
        """The answer's ids, step by step."""
        generator = torch.Generator(self.decoder.device).manual_seed(seed) if rule.samples else None
        return self.decoder.stream(prompt, max_new_tokens, rule, generator)


def load_chat_model(
    export: Path,
    *,
    plain: bool,
    base_model: str | None,
    gpus: int | None,
    settings: Mapping[str, Any],
) -> ChatModel:
    """An export's target with its heads and tree, or alone, warmed up; `settings` are keys of
    `target`.

    Raises:
        ConfigError: The target does not exist or does not match the heads; the tree is invalid.
        DataError: The directory is not an export, or is damaged.
        EnvironmentFault: The Hub or the GPU is not available.
    """
    if plain:
        target = load_target(base_model or target_of(export), gpus=gpus, **settings)
        decoder, how = target.decoder(), "without heads"
    else:
        loaded = load_export(export, target=base_model, gpus=gpus, **settings)
        target, decoder = loaded.target, loaded.decoder
        how = f"{decoder.tree.max_depth} heads, a tree of {decoder.tree.num_nodes} nodes"
    decoder.generate(target.prompt(GREETING), NUM_WARM_UP_TOKENS)
    return ChatModel(
        target, decoder, f"{target.spec.model}, {how}, {target.spec.dtype}, {decoder.device}"
    )
