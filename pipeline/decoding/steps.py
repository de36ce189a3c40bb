"""One step of decoding: the heads propose a tree per text, the target verifies it, the accepted
path is kept.

Paper 2.1 and 2.3.1.

Letters: B texts, N rows (the root and the nodes), T positions of a path, D hidden size, V
    vocabulary, K heads, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.cache import TreeCache
from pipeline.decoding.dynamic_tree import DynamicTree, GrownTree
from pipeline.decoding.masks import GrownMasks, TreeMasks
from pipeline.decoding.readout import Forward
from pipeline.decoding.tree import Tree
from pipeline.heads.kind import Heads


class BatchState(NamedTuple):
    """The hidden states [B, D] that the heads read next, and the tokens [B] chosen last."""

    hidden_BD: Tensor
    token_B: Tensor


class TreeSteps:
    """The decoding steps of a batch, with inputs of exactly the current length: for any model on
    any device.
    """

    captures = False  # as CUDA graphs

    def __init__(
        self,
        tree: Tree | DynamicTree,
        heads: Heads | None,
        masks: TreeMasks | GrownMasks,
        cache: TreeCache,
        max_length: int,
    ):
        self.tree, self.heads, self.masks, self.cache, self.max_length = (
            tree,
            heads,
            masks,
            cache,
            max_length,
        )

    def start(self, state: BatchState) -> None:
        """Set the state; the prompts are in the cache already."""
        self.state = state

    def drop(self, kept: Sequence[int]) -> None:
        """Keep only the texts at these indices, ascending."""
        self.cache.drop(kept)
        self.state = BatchState(*(column[kept] for column in self.state))

    def take(
        self, forward: Forward, rule: AcceptanceRule, noise_BTV: Tensor | None
    ) -> list[list[int]]:
        """One forward of the target; returns the tokens that it adds to each text."""
        lengths, token_B = self.cache.lengths, self.state.token_B
        starts = (
            lengths[0]
            if len(lengths) == 1
            else torch.tensor(lengths, device=token_B.device)[:, None]
        )
        tree, tokens_BN = self.propose()
        positions_BN = tree.depth.expand_as(tokens_BN) + starts
        if (
            max(lengths) + tree.max_depth >= self.max_length
        ):  # these rows are cut later, but their positions must exist
            positions_BN.clamp_(max=self.max_length - 1)
        mask = self.masks.after(lengths, tree) if tree.max_depth or len(lengths) > 1 else None
        hidden_BND, logits_BNV = forward(tokens_BN, positions_BN, mask, self.cache)
        self.state, retrieve_BT, found = self.accept(
            hidden_BND, logits_BNV, tokens_BN, tree, rule, noise_BTV
        )
        rows, written = self.read(found)
        self.cache.keep(rows, retrieve_BT)
        return written

    def propose(self) -> tuple[Tree | GrownTree, Tensor]:
        """The trees, and the tokens [B, N] of their rows: the root's, then the heads' guesses."""
        hidden_BD, token_B = self.state
        if isinstance(self.tree, Tree) and not self.tree.num_nodes:
            return self.tree, token_B[:, None]
        assert self.heads is not None
        hidden_BD = hidden_BD.to(
            self.heads.device
        )  # a target over several GPUs returns its states on the last one
        return self.tree.grow(self.heads, hidden_BD, token_B)

    def accept(
        self,
        hidden_BND: Tensor,
        logits_BNV: Tensor,
        tokens_BN: Tensor,
        tree: Tree | GrownTree,
        rule: AcceptanceRule,
        noise_BTV: Tensor | None,
    ) -> tuple[BatchState, Tensor, Tensor]:
        """What the rule keeps of the trees that a forward has read.

        Returns the new state, the rows [B, T] to keep, and what the host reads of each text, [B, 2
        T + 2]: how deep the accepted row is, the rows and the tokens from the root to it, and the
        token after it.
        """
        if not tree.max_depth:
            token_B = rule.choose(logits_BNV[:, 0], None if noise_BTV is None else noise_BTV[:, 0])
            found = torch.stack(
                (torch.zeros_like(token_B), torch.zeros_like(token_B), tokens_BN[:, 0], token_B), 1
            )
            return BatchState(hidden_BND[:, 0], token_B), found[:, 1:2], found
        row_B, token_B = rule.accept(logits_BNV, tokens_BN, tree, noise_BTV)
        retrieve_BT = tree.path_to(row_B)
        chosen_B11 = row_B[:, None, None].to(hidden_BND.device)
        hidden_BD = hidden_BND.gather(1, chosen_B11.expand(-1, 1, hidden_BND.shape[-1]))[:, 0]
        path = (
            tree.depth_of(row_B)[:, None],
            retrieve_BT,
            tokens_BN.gather(1, retrieve_BT),
            token_B[:, None],
        )
        return BatchState(hidden_BD, token_B), retrieve_BT, torch.cat(path, 1)

    def read(self, found: Tensor) -> tuple[list[list[int]], list[list[int]]]:
        """The rows that each text keeps and the tokens it gains; the only transfer from the device
        in a step.
        """
        length = self.tree.max_depth + 1
        rows, written = [], []
        for depth, *fields in found.tolist():
            rows.append(fields[: depth + 1])
            written.append([*fields[length + 1 : length + 1 + depth], fields[-1]])
        return rows, written
