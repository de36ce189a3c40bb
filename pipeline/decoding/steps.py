"""One step of decoding: the heads propose a tree per text, the target verifies it, the accepted path is kept.

Paper 2.1 and 2.3.1.

Letters: B texts, N rows (the root and the nodes), T positions of a path, D hidden size, V vocabulary, K heads, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.cache import TreeCache
from pipeline.decoding.masks import Masks, TreeMasks
from pipeline.decoding.readout import Forward
from pipeline.decoding.tree import Tree
from pipeline.heads.kind import Heads


class BatchState(NamedTuple):
    """The hidden states [B, D] that the heads read next, and the tokens [B] chosen last."""

    hidden_BD: Tensor
    token_B: Tensor


class TreeSteps:
    """The decoding steps of a batch, with inputs of exactly the current length: for any model on any device."""

    captures = False  # as CUDA graphs

    def __init__(self, tree: Tree, heads: Heads | None, masks: TreeMasks, cache: TreeCache, max_length: int):
        self.tree, self.heads, self.masks, self.cache, self.max_length = tree, heads, masks, cache, max_length

    def start(self, state: BatchState) -> None:
        """Set the state; the prompts are in the cache already."""
        self.state = state

    def drop(self, kept: Sequence[int]) -> None:
        """Keep only the texts at these indices, ascending."""
        self.cache.drop(kept)
        self.state = BatchState(*(column[kept] for column in self.state))

    def take(self, forward: Forward, rule: AcceptanceRule, noise_BTV: Tensor | None) -> list[list[int]]:
        """One forward of the target; returns the tokens that it adds to each text."""
        tree, lengths, token_B = self.tree, self.cache.lengths, self.state.token_B
        starts = lengths[0] if len(lengths) == 1 else torch.tensor(lengths, device=token_B.device)[:, None]
        positions_BN = tree.depth[None] + starts
        if max(lengths) + tree.max_depth >= self.max_length:  # these rows are cut later, but their positions must exist
            positions_BN.clamp_(max=self.max_length - 1)
        mask = self.masks.after(lengths) if tree.num_nodes or len(lengths) > 1 else None
        self.state, retrieve_BT, found = self.verify(forward, positions_BN, mask, rule, noise_BTV)
        rows, written = self.read(found)
        self.cache.keep(rows, retrieve_BT)
        return written

    def propose(self) -> Tensor:
        """The tokens [B, N] of each tree: the root, then the heads' guesses."""
        hidden_BD, token_B = self.state
        if not self.tree.num_nodes:
            return token_B[:, None]
        assert self.heads is not None
        hidden_BD = hidden_BD.to(self.heads.device)  # a target over several GPUs returns its states on the last one
        return torch.cat((token_B[:, None], self.heads.propose(hidden_BD, token_B, self.tree)), 1)

    def verify(
        self, forward: Forward, positions_BN: Tensor, mask: Masks, rule: AcceptanceRule, noise_BTV: Tensor | None
    ) -> tuple[BatchState, Tensor, Tensor]:
        """One forward over the trees.

        Returns the new state, the rows [B, T] to keep, and what the host reads, [B, T + 2]: for each text the
        accepted row, the tokens on its path, and the token after it.
        """
        tree, tokens_BN = self.tree, self.propose()
        hidden_BND, logits_BNV = forward(tokens_BN, positions_BN, mask, self.cache)
        if not tree.num_nodes:
            token_B = rule.choose(logits_BNV[:, 0], None if noise_BTV is None else noise_BTV[:, 0])
            return BatchState(hidden_BND[:, 0], token_B), tree.retrieve_indices, token_B[:, None]
        row_B, token_B = rule.accept(logits_BNV, tokens_BN, tree, noise_BTV)
        retrieve_BT = tree.retrieve_indices.index_select(0, row_B)
        chosen_B11 = row_B[:, None, None].to(hidden_BND.device)
        hidden_BD = hidden_BND.gather(1, chosen_B11.expand(-1, 1, hidden_BND.shape[-1]))[:, 0]
        found = torch.cat((row_B[:, None], tokens_BN.gather(1, retrieve_BT), token_B[:, None]), 1)
        return BatchState(hidden_BD, token_B), retrieve_BT, found

    def read(self, found: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """The rows that each text keeps and the tokens it gains; the only transfer from the device in a step."""
        fetched = found.tolist()
        if not self.tree.num_nodes:
            return [[0]] * len(fetched), fetched
        rows = [self.tree.retrieve_paths[row] for row, *_ in fetched]
        return rows, [[*path[1 : len(kept)], token] for kept, (_, *path, token) in zip(rows, fetched, strict=True)]
