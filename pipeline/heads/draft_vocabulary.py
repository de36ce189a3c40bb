"""The tokens that heads can propose: all of the target's, or those that it writes most often
(`train.draft_vocab`).

Few tokens make up most of a text, and `lm_head` is most of what a head computes and reads: with a
quarter of its rows it takes a quarter of that (FR-Spec, arXiv 2502.14856). Row i of a pruned
`lm_head` stands for the token `token_map[i]`, ascending. A token outside is never proposed, and the
target writes it itself. As EAGLE-3's code does (arXiv 2503.01840), heads learn nothing where the
written token is outside, and elsewhere of the target's distribution the part within, which sums to
one again. In accuracies tokens outside are misses.

Letters: W the target's tokens, V those of the draft vocabulary, K heads, N rows, D hidden size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from pipeline.conversations.spans import IGNORED
from pipeline.errors import DataError
from pipeline.heads.shape import HeadsShape
from pipeline.heads.soft_labels import Teacher

TOKEN_MAP = "token_map"  # its name in files; vLLM's


class DraftVocabulary(nn.Module):
    """Which token each row of `lm_head` stands for: any by its own number, unless the shape is
    pruned.

    `token_map` is int64 [V], zero until it is filled, and None where nothing is pruned. It moves
    along with the heads it is part of.
    """

    token_map: Tensor | None
    rows_W: Tensor | None  # of `lm_head`, by token; -100 for those outside

    def __init__(self, shape: HeadsShape):
        super().__init__()
        self.target_size = shape.target_vocab_size
        token_map = torch.zeros(shape.vocab_size, dtype=torch.int64) if shape.is_pruned else None
        rows_W = torch.full((self.target_size,), IGNORED) if shape.is_pruned else None
        self.register_buffer(TOKEN_MAP, token_map, persistent=False)
        self.register_buffer("rows_W", rows_W, persistent=False)

    def fill(self, tokens_V: Tensor, where: str | None = None) -> None:
        """Take these tokens, ascending; raises DataError, with `where`, for others than so many of
        the target's.
        """
        assert self.token_map is not None and self.rows_W is not None, "all tokens are drafted"
        right = tokens_V.shape == self.token_map.shape and not tokens_V.is_floating_point()
        if (
            not right
            or tokens_V[0] < 0
            or tokens_V[-1] >= self.target_size
            or not (tokens_V.diff() > 0).all()
        ):
            what = (
                f"The draft vocabulary is not {len(self.token_map)} of the target's"
                f" {self.target_size} tokens in order."
            )
            raise DataError(what, where, "Export or train these heads again.")
        self.token_map.copy_(tokens_V)
        self.rows_W.fill_(IGNORED)
        self.rows_W[self.token_map] = torch.arange(len(self.token_map), device=self.rows_W.device)

    def tokens(self, rows: Tensor) -> Tensor:
        """The tokens that rows of `lm_head` stand for, in any shape; nothing goes to the host."""
        return rows if self.token_map is None else self.token_map[rows]

    def rows(self, labels: Tensor) -> Tensor:
        """Labels as rows of `lm_head`, in their shape; -100 where they are -100 or outside."""
        if self.rows_W is None:
            return labels
        return self.rows_W[labels.clamp(min=0)].where(labels != IGNORED, IGNORED)

    def num_learned(self, labels_KN: Tensor) -> Tensor:
        """How many labels each head learns, [K]."""
        return (self.rows(labels_KN) != IGNORED).sum(1)

    def teacher(self, teacher: Teacher) -> Teacher:
        """The same with distributions over the draft vocabulary alone."""
        return (
            teacher
            if self.token_map is None
            else teacher._replace(head=teacher.head.of_tokens(self.token_map))
        )

    def over_all_tokens(self, lm_head: Tensor) -> Tensor:
        """`lm_head` [..., V, D] with a row for each of the target's tokens, [..., W, D], and the
        same first guess.

        For engines that have no draft vocabulary. A token outside gets the mean of the rows: its
        logit is the mean of their logits, which is never above the largest.
        """
        if self.token_map is None:
            return lm_head
        rows = lm_head.detach()
        whole = rows.mean(-2, keepdim=True).repeat_interleave(self.target_size, -2)
        return whole.index_copy_(-2, self.token_map.to(whole.device), rows)


def most_frequent(counts_W: npt.NDArray[np.int64], num_tokens: int) -> Tensor:
    """The tokens [V] that were counted most often, ascending; of equals those with the lower
    number.
    """
    order = np.argsort(-counts_W, kind="stable")
    return torch.from_numpy(np.sort(order[:num_tokens]))
