"""A target behind one small protocol, whichever engine runs it.

Token ids go in and come out: no engine tokenizes, detokenizes or adds a special token of its own. The two kinds of
engine are apart because they are loaded at different times and place memory differently.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from pipeline.conversations.requests import Completion, Request


class GenerationEngine(Protocol):
    """Writes text. Requests may be added at any time, so a conversation's next turn joins the moment its last ends.

    A text ends with a token of the target's EOS set or of the request's `stop_token_ids` (kept as its last id;
    finished "stop"), or at `max_new_tokens` or the context's end ("length").
    """

    capacity: int  # requests under way at once; more only queue

    def add(self, request: Request) -> None:
        """Queue a request. ValueError: an empty prompt, one that fills the context, or an id that is under way."""

    def step(self) -> list[Completion]:
        """Advance every running request by at least one token; the requests that this ended. [] when nothing runs."""

    @property
    def num_unfinished(self) -> int:
        """Requests added and not yet returned."""

    def close(self) -> None:
        """Give the memory back. The engine is not used again."""


def check_request(request: Request, context: int, under_way: Container[str]) -> None:
    """Raise the ValueError that `GenerationEngine.add` promises."""
    if not 0 < len(request.prompt_ids) < context:
        raise ValueError(f"{request.id}: {len(request.prompt_ids)} prompt tokens in a context of {context}")
    if request.id in under_way:
        raise ValueError(f"{request.id} is under way")


class FeatureEngine(Protocol):
    """Reads text: the last hidden states after the final norm, exactly what the target's lm_head reads."""

    hidden_size: int
    dtype: torch.dtype

    def stream(self, rows: Iterable[Sequence[int]]) -> Iterator[torch.Tensor]:
        """The states [T_i, D] of each row on the host, in the rows' order, while later rows are being computed.

        A tensor may be a view of a buffer that its neighbours share: copy what is to be kept.
        """

    def close(self) -> None:
        """Give the memory back. The engine is not used again."""
