"""Requests to a generation engine, and their completions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters; temperature 0 is greedy, top_p 1 is off."""

    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """A text to be generated. `id` is unique among all requests of a run."""

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    seed: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """The sampled ids, including the stop token if one ended the text."""

    id: str
    token_ids: list[int]
    finished: Finish


def sample_seed(run_seed: int, row_id: str, turn: int) -> int:
    """The 63-bit seed of one sampled text, independent of worker and batch."""
    digest = hashlib.sha256(f"{run_seed}:{turn}:{row_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
