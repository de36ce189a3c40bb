"""Spans of tokens that the target wrote, and the labels that heads learn from them.

Head k (0-based) reads the state at position t and predicts the token at t+2+k. It has a label there
if and only if t+1 and t+2+k are in the same span. So no head learns to predict prompts, or tokens
of the next turn.

Letters: K heads, N positions (one per target-written token).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.conversations.conversation import Role

IGNORED = -100  # torch's cross_entropy skips this label


@dataclass(frozen=True)
class Span:
    """A range of token positions [start, end) that the target wrote, and the role it wrote in."""

    start: int
    end: int
    role: Role

    def __post_init__(self) -> None:
        assert 1 <= self.start < self.end, (
            f"a span needs a state before it and a token in it: {self}"
        )

    def __len__(self) -> int:
        return self.end - self.start


def feature_positions(spans: Sequence[Span]) -> npt.NDArray[np.int32]:
    """Return the positions of the states that predict a conversation's target-written tokens [N].

    These are the positions s-1 … e-2 of every span [s, e), in order.
    """
    ranges = [np.arange(span.start - 1, span.end - 1, dtype=np.int32) for span in spans]
    return np.concatenate(ranges) if ranges else np.empty(0, np.int32)


def head_labels(
    input_ids: npt.ArrayLike, spans: Sequence[Span], num_heads: int, roles: Collection[Role]
) -> npt.NDArray[np.int32]:
    """Return the token ids that K heads learn at the feature positions of a row [K, N].

    The label is `IGNORED` where a head has none.

    Args:
        input_ids: The row's token ids.
        spans: The target-written spans.
        num_heads: K.
        roles: The roles whose spans have labels (`train.roles`).
    """
    ids = np.asarray(input_ids, dtype=np.int32)
    positions_N = feature_positions(spans)
    ends = [span.end if span.role in roles else 0 for span in spans]
    end_N = np.repeat(np.asarray(ends, dtype=np.int64), [len(span) for span in spans])
    # t+1 is in the span by construction, and t+2+k > t+1, so only the span's end has to be checked.
    wanted_KN = positions_N[None, :] + 2 + np.arange(num_heads)[:, None]
    inside_KN = wanted_KN < end_N[None, :]
    return np.where(inside_KN, ids[np.where(inside_KN, wanted_KN, 0)], IGNORED).astype(np.int32)
