"""What passes between a conversation and an engine: a request to write one text, and the text."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How the target's next token is drawn; temperature 0 is greedy, top_p 1 is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One text to be written by the target. `id` is unique among all requests of a run."""

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    seed: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """What the target wrote: the very ids that were sampled, the stop token among them if one ended the text."""

    id: str
    token_ids: list[int]
    finished: Finish


def sample_seed(run_seed: int, row_id: str, turn: int) -> int:
    """The seed of one sampled text, in 63 bits: the same wherever and in whatever company it is sampled."""
    digest = hashlib.sha256(f"{run_seed}:{turn}:{row_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
