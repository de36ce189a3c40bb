"""Draft heads in decoding, with the key/value cache of those that attend to the text.

After each forward pass of the target, the heads read the positions that stay in the text: the
prompt, or the accepted path of a tree. For most kinds this only selects the state of the last
position.

Letters: B texts, T positions of a prompt or a path, X size of what the heads read at a position,
N rows of a tree, D size of a root state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import Tree, TreeRows
from pipeline.heads.draft_cache import DraftCache
from pipeline.heads.kind import Heads


class Drafter:
    """The heads of a decoder and their cache; without heads, for plain decoding, it drafts nothing.

    Call `begin_batch`, then `read_prompt` for each text, and `read_paths` after each step.
    """

    def __init__(self, heads: Heads | None):
        self.heads = heads
        self._cache: DraftCache | None = None
        self._sizes = (0, 0)  # texts and slots of the cache
        self._num_texts = 0

    @property
    def row_layers(self) -> tuple[int, ...]:
        """The layers of the target that the heads read at every position; see `HeadsShape`."""
        return self.heads.shape.row_layers if self.heads else ()

    def begin_batch(self, num_slots: int, num_texts: int) -> None:
        """Reset the heads' cache for a batch; allocate it again if it is too small.

        The cache is reallocated exactly when a `TreeCache` of these sizes is, so that captured
        graphs of steps notice it.
        """
        self._num_texts = 0
        if self.heads is None:
            return
        if num_texts > self._sizes[0] or num_slots > self._sizes[1]:
            self._sizes = (0, 0)
            self._cache = None  # freed before the allocation, which may fail
            self._cache = self.heads.open_cache(num_texts, num_slots)
            self._sizes = (num_texts, num_slots)
        if self._cache:
            self._cache.length_B.zero_()

    def read_prompt(self, read_1TX: Tensor, ids: Sequence[int], token_1: Tensor) -> Tensor:
        """Read the prompt `ids` of another text, which `token_1` follows; return its root [1, D].

        `read_1TX` may hold its last positions alone, for heads that read no more.
        """
        self._num_texts += 1
        if self.heads is None:
            return read_1TX[:, -1]
        num_rows = read_1TX.shape[1]
        later_1T = torch.tensor([ids[len(ids) - num_rows + 1 :]], dtype=torch.int64)
        next_1T = torch.cat((later_1T.to(token_1.device), token_1[:, None]), 1)
        num_1 = torch.tensor([num_rows], device=token_1.device)
        return self._advance(read_1TX, next_1T, num_1, self._num_texts - 1)

    def read_paths(self, read_BTX: Tensor, next_BT: Tensor, num_B: Tensor) -> Tensor:
        """Read the first `num_B` positions of each text's path; return the roots [B, D].

        `next_BT` holds the token after each position.
        """
        if self.heads is None:
            return read_BTX[:, 0]
        return self._advance(read_BTX, next_BT, num_B, 0)

    def _advance(self, read_BTX: Tensor, next_BT: Tensor, num_B: Tensor, first: int) -> Tensor:
        """Let the heads read new positions of the texts from the batch index `first` on."""
        assert self.heads is not None
        device = self.heads.device  # a target over several GPUs returns its states on the last one
        cache = self._cache and self._cache.texts(first, len(next_BT))
        return self.heads.advance(read_BTX.to(device), next_BT.to(device), num_B.to(device), cache)

    def grow(
        self, tree: Tree | DynamicTree, hidden_BD: Tensor, token_B: Tensor
    ) -> tuple[TreeRows, Tensor]:
        """Propose a tree per text; return the trees and the tokens [B, N] of their rows."""
        assert self.heads is not None
        cache = self._cache and self._cache.texts(0, len(token_B))
        return tree.grow(self.heads, hidden_BD, token_B, cache)

    def keep(self, kept: Sequence[int]) -> None:
        """Drop all texts except the ascending batch indices `kept`."""
        if self._cache:
            self._cache.keep(kept)
