"""Dynamic candidate trees: every step builds a tree of the heads' most probable paths.

EAGLE-2 (arXiv 2406.16858, section 4): at each depth, the `top` most probable nodes are expanded by
their `top` best guesses. The probability of a node is the product of the heads' probabilities along
its path. The target verifies the `num_nodes` most probable of all proposed nodes. A static tree
has the nodes that were right most often on held-out text; a dynamic tree has the nodes that are
most probable in this step. Shapes are the same in every step, and nothing is decided on the host,
so that a step can be captured as a CUDA graph.

Letters: B texts, N rows (the root and the nodes), T positions of a path with its root, C proposed
nodes, M selected nodes (of one depth, or to verify), P nodes that are expanded, R guesses per node,
D hidden size, V vocabulary, K depths.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipeline.decoding.tree import Choices, TreePath, TreeRows, check_choices
from pipeline.errors import ConfigError
from pipeline.heads.draft_cache import DraftCache
from pipeline.heads.kind import Heads

NEVER = torch.iinfo(torch.int16).max  # the rank of a node that is not proposed
PREFER_PARENT = 1e-3  # subtracted per depth: a parent comes before an equally probable child
CHUNK_BYTES = 512 << 20  # of fp32 logits at a time; each chunk reads the whole lm_head
LEAST = -100.0  # lower bound of a guess's log probability, so that PREFER_PARENT counts in fp32


class Proposed(NamedTuple):
    """The proposed nodes of dynamic trees, by depth; each tensor is [B, C].

    A score is the log probability of the node's path (each guess's at least `LEAST`) minus
    `PREFER_PARENT` per depth. A parent is 0 for the root and i + 1 for the proposed node i. The
    depth of the root's children is 1.
    """

    tokens_BC: Tensor
    scores_BC: Tensor
    parents_BC: Tensor
    depth_BC: Tensor


@dataclass(frozen=True)
class DynamicTree:
    """A dynamic candidate tree of `num_nodes` nodes besides the root, with `top` guesses per node.

    Raises ValueError if a number is below 1, or `num_nodes` exceeds `num_proposed`.
    """

    num_nodes: int
    max_depth: int
    top: int = 10

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.max_depth, self.top) < 1 or self.num_nodes > self.num_proposed:
            raise ValueError(f"{self.num_nodes} nodes of the {self.num_proposed} that are proposed")

    @property
    def num_proposed(self) -> int:
        """The number C of candidate tree nodes that the heads propose in a decoding step."""
        return self.top + (self.max_depth - 1) * self.top**2

    def resized(self, num_nodes: int) -> DynamicTree:
        """Return a copy of this tree with `num_nodes` nodes, or all proposed ones if fewer."""
        return replace(self, num_nodes=min(num_nodes, self.num_proposed))

    def grow(
        self, heads: Heads, hidden_BD: Tensor, token_B: Tensor, cache: DraftCache | None = None
    ) -> tuple[TreeRows, Tensor]:
        """Build one dynamic tree per text; return the trees and the tokens [B, N] of their rows.

        The arguments are those of `propose`.
        """
        proposed = self.propose(heads, hidden_BD, token_B.to(hidden_BD.device), cache)
        proposed = Proposed(*(column.to(token_B.device) for column in proposed))
        best_BM = proposed.scores_BC.topk(self.num_nodes).indices
        chosen_BM = best_BM.sort(1).values  # parents were proposed before children
        tokens_BN = torch.cat((token_B[:, None], proposed.tokens_BC.gather(1, chosen_BM)), 1)
        return self._select_tree(chosen_BM, proposed), tokens_BN

    def propose(
        self, heads: Heads, hidden_BD: Tensor, token_B: Tensor, cache: DraftCache | None = None
    ) -> Proposed:
        """Propose the C nodes from which each text's dynamic tree is selected.

        Args:
            heads: The draft heads.
            hidden_BD: The root states of `Heads.advance`.
            token_B: The tokens of the roots.
            cache: The heads' key/value cache, if they have one.
        """
        hidden_BPD = hidden_BD[:, None]
        tokens_BP = token_B[:, None]
        scores_BP = torch.zeros_like(tokens_BP, dtype=torch.float32)
        places_BP = torch.zeros_like(tokens_BP)
        levels = []
        num_before = 1  # the root
        for depth in range(self.max_depth):
            hidden_BPD, logits_BPV = heads.expand(hidden_BPD, tokens_BP, depth, cache)
            rows_BPR, log_p_BPR = _best_guesses(logits_BPV, self.top)
            tokens_BM = heads.vocabulary.tokens_of_rows(rows_BPR).flatten(1)
            scores_BPR = scores_BP[..., None] + log_p_BPR.clamp(min=LEAST) - PREFER_PARENT
            parents_BM = places_BP[..., None].expand_as(scores_BPR).flatten(1)
            scores_BM = scores_BPR.flatten(1)
            depth_BM = torch.full_like(tokens_BM, depth + 1)
            levels.append(Proposed(tokens_BM, scores_BM, parents_BM, depth_BM))
            best_BP = scores_BM.topk(self.top).indices  # expanded next
            tokens_BP = tokens_BM.gather(1, best_BP)
            scores_BP = scores_BM.gather(1, best_BP)
            places_BP = best_BP + num_before
            hidden_BPD = hidden_BPD.take_along_dim((best_BP // self.top)[..., None], 1)
            num_before += tokens_BM.shape[1]
        return Proposed(*(torch.cat(column, 1) for column in zip(*levels, strict=True)))

    @torch.no_grad()
    def places(
        self,
        heads: Heads,
        hidden_BD: Tensor,
        token_B: Tensor,
        labels_KB: Tensor,
    ) -> Tensor:
        """Return the rank of each true token's node among the proposed nodes, int16 [K, B].

        Nodes are ranked by score, from 0. A tree of n nodes verifies the nodes of rank below n, so
        one pass evaluates trees of every size. The rank is `NEVER` if the node or an ancestor is
        not proposed, or the label is -100.

        Args:
            heads: The draft heads.
            hidden_BD: The target's hidden states at positions t.
            token_B: The tokens at t+1, the roots.
            labels_KB: The tokens at t+2+k; only the first `max_depth` of K are used and returned.
        """
        num_texts = max(1, CHUNK_BYTES // (4 * self.top * heads.shape.vocab_size))
        labels_KB = labels_KB[: self.max_depth]
        tensors = (hidden_BD.split(num_texts), token_B.split(num_texts))
        places = []
        for *roots, labels in zip(*tensors, labels_KB.split(num_texts, 1), strict=True):
            places.append(_true_places(self.propose(heads, *roots), labels))
        return torch.cat(places, 1)

    def _select_tree(self, chosen_BM: Tensor, proposed: Proposed) -> TreeRows:
        """Build the trees of the selected nodes, given as ascending indices into `proposed`."""
        rows_BM = torch.arange(1, self.num_nodes + 1, device=chosen_BM.device).expand_as(chosen_BM)
        root_B1 = torch.zeros_like(chosen_BM[:, :1])
        row_BC = torch.zeros_like(proposed.parents_BC).scatter(1, chosen_BM, rows_BM)
        row_of_node = torch.cat((root_B1, row_BC), 1)
        parent_BM = row_of_node.gather(1, proposed.parents_BC.gather(1, chosen_BM))
        depth_BM = proposed.depth_BC.gather(1, chosen_BM)
        return TreeRows(
            torch.cat((root_B1, parent_BM), 1), torch.cat((root_B1, depth_BM), 1), self.max_depth
        )


def check_tree(
    tree: Choices | DynamicTree, max_depth: int, top: int
) -> tuple[TreePath, ...] | DynamicTree:
    """Validate a candidate tree: return a static tree as paths, a dynamic tree unchanged.

    Raises ConfigError unless the tree fits heads that propose `max_depth` tokens ahead, with `top`
    guesses each.
    """
    if not isinstance(tree, DynamicTree):
        return check_choices(tree, max_depth, top)
    if tree.max_depth > max_depth or tree.top > top:
        raise ConfigError(
            f"A dynamic tree of depth {tree.max_depth} does not fit: the heads propose {max_depth}"
            f" tokens ahead, {top} guesses each.",
            "tree",
            "Lower calibrate.depth or calibrate.top.",
        )
    return tree


def _best_guesses(logits_BPV: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the `top` best guesses below each node and their log probabilities, [B, P, R] each.

    Guesses are rows of the lm_head.
    """
    num_nodes = logits_BPV.shape[1]
    if logits_BPV.stride(1) == 0:  # Medusa heads: the same logits at every node
        logits_BPV = logits_BPV[:, :1]
    best = logits_BPV.topk(top)
    log_p_BPR = best.values.float() - logits_BPV.float().logsumexp(-1, keepdim=True)
    return best.indices.expand(-1, num_nodes, -1), log_p_BPR.expand(-1, num_nodes, -1)


def _true_places(proposed: Proposed, labels_KB: Tensor) -> Tensor:
    """Return the rank of each true token's node among the proposed nodes, int16 [K, B].

    The node of a true token must be a child of the previous true token's node; the first one must
    be a child of the root. Other tokens have the rank `NEVER`.
    """
    order_BC = proposed.scores_BC.argsort(1, descending=True)
    by_place_BC = torch.arange(order_BC.shape[1], device=order_BC.device).expand_as(order_BC)
    place_BC = torch.empty_like(order_BC).scatter_(1, order_BC, by_place_BC)
    parent_B1 = torch.zeros_like(order_BC[:, :1])  # the root
    places = []
    for labels_B in labels_KB:
        is_child_BC = proposed.parents_BC == parent_B1
        right_BC = is_child_BC & (proposed.tokens_BC == labels_B[:, None])
        is_proposed_B1 = right_BC.any(1, keepdim=True)
        node_B1 = right_BC.int().argmax(1, keepdim=True)
        parent_B1 = (node_B1 + 1).where(is_proposed_B1, -1)
        place_B1 = place_BC.gather(1, node_B1).where(is_proposed_B1, NEVER)
        places.append(place_B1.clamp(max=NEVER)[:, 0])
    return torch.stack(places).to(torch.int16)
