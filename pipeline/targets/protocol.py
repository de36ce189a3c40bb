"""The protocols of generation and feature engines.

Token ids in, token ids or states out: no engine tokenizes, detokenizes or adds special tokens. The two are separate
because they are loaded at different times and use memory differently.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pipeline.conversations.requests import Completion, Request


class GenerationEngine(Protocol):
    """Generates text. Requests may be added at any time, so a conversation's next turn can follow at once.

    A text ends with a token of the target's EOS set or of the request's `stop_token_ids` (included; finished "stop"),
    or at `max_new_tokens` or the end of the context ("length").
    """

    capacity: int  # concurrent requests; more are queued

    def add(self, request: Request) -> None:
        """Queue a request. ValueError: an empty prompt, one that fills the context, or an id that is running."""

    def step(self) -> list[Completion]:
        """Advance every running request by at least one token; returns those that finished."""

    @property
    def num_unfinished(self) -> int:
        """Requests added and not yet finished."""

    def close(self) -> None:
        """Release the memory; the engine cannot be used again."""


def check_request(request: Request, context: int, under_way: Container[str]) -> None:
    """Raise the ValueError that `GenerationEngine.add` promises."""
    if not 0 < len(request.prompt_ids) < context:
        raise ValueError(f"{request.id}: {len(request.prompt_ids)} prompt tokens in a context of {context}")
    if request.id in under_way:
        raise ValueError(f"{request.id} is running already")


class FeatureEngine(Protocol):
    """Computes the last hidden states after the final norm, which are what the target's lm_head reads."""

    hidden_size: int
    dtype: torch.dtype

    def stream(self, rows: Iterable[Sequence[int]]) -> Iterator[torch.Tensor]:
        """The states [T_i, D] of each row on the host, in order, while later rows are computed.

        A tensor may be a view of a shared buffer: copy what is to be kept.
        """

    def close(self) -> None:
        """Release the memory; the engine cannot be used again."""
