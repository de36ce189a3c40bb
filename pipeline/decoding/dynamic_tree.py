"""A tree that grows anew in every step, along the paths that the heads themselves find probable.

EAGLE-2 (arXiv 2406.16858, section 4): level by level the `top` most probable nodes get their `top` best guesses each,
a node's probability being the product of the heads' own along its path; of all nodes that were so proposed the
`num_nodes` most probable are verified. A static tree spends its nodes where guesses were right most often on held-out
text; this one, where they are likely to be right here. Shapes are the same in every step, and nothing is decided on the
host, so that a step can be captured as a CUDA graph.

Letters: B texts, N rows (the root and the nodes), T positions of a path with its root, C proposed nodes, P nodes that
are expanded, R guesses per node, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from pipeline.heads.kind import Heads

# Subtracted per depth, so that of equals a parent comes before its child. No guess is held less probable than e^-100,
# lest fp32 lose it.
PREFER_PARENT, LEAST = 1e-3, -100.0


@dataclass(frozen=True)
class GrownTree:
    """The trees of one step; as of `Tree`, with one tree per text: `parent` and `depth` [B, N], `ancestors` and
    `elsewhere` [B, N, N], `retrieve_indices` [B, N, T]."""

    parent: Tensor
    depth: Tensor
    ancestors: Tensor
    elsewhere: Tensor
    retrieve_indices: Tensor
    max_depth: int

    def path_to(self, row_B: Tensor) -> Tensor:
        """The rows [B, T] from the root to one row each, padded with 0 past its depth."""
        return self.retrieve_indices.take_along_dim(row_B[:, None, None], 1)[:, 0]

    def depth_of(self, row_B: Tensor) -> Tensor:
        return self.depth.take_along_dim(row_B[:, None], 1)[:, 0]


@dataclass(frozen=True)
class DynamicTree:
    """How trees grow: `num_nodes` of them besides the root, at most `max_depth` deep, `top` guesses per node.

    Raises ValueError where so many nodes are never proposed.
    """

    num_nodes: int
    max_depth: int
    top: int = 10

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.max_depth, self.top) < 1 or self.num_nodes > self.num_proposed:
            raise ValueError(f"{self.num_nodes} nodes of the {self.num_proposed} that are proposed")

    @property
    def num_proposed(self) -> int:
        """The nodes that are proposed in a step, C."""
        return self.top + (self.max_depth - 1) * self.top**2

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def described(self) -> str:
        return f"{self.num_nodes} nodes, chosen in every step, at most {self.max_depth} deep"

    def grow(self, heads: Heads, hidden_BD: Tensor, token_B: Tensor) -> tuple[GrownTree, Tensor]:
        """The trees, and the tokens [B, N] of their rows."""
        proposed = self.propose(heads, hidden_BD, token_B.to(hidden_BD.device))
        tokens_BC, scores_BC, parents_BC, depth_BC = (column.to(token_B.device) for column in proposed)
        chosen_BM = scores_BC.topk(self.num_nodes).indices.sort(1).values  # parents were proposed before children
        tree = _tree(chosen_BM, parents_BC, depth_BC.gather(1, chosen_BM), self.max_depth)
        return tree, torch.cat((token_B[:, None], tokens_BC.gather(1, chosen_BM)), 1)

    def propose(self, heads: Heads, hidden_BD: Tensor, token_B: Tensor) -> tuple[Tensor, ...]:
        """All proposed nodes, depth after depth: their tokens, log probabilities, parents and depths, each [B, C].

        Log probabilities are those of whole paths, less a little per depth; the root is the parent -1.
        """
        hidden_BPD, tokens_BP = hidden_BD[:, None], token_B[:, None]
        scores_BP = torch.zeros_like(tokens_BP, dtype=torch.float32)
        places_BP = torch.full_like(tokens_BP, -1)
        proposed: list[tuple[Tensor, ...]] = []
        num_proposed = 0
        for depth in range(self.max_depth):
            hidden_BPD, logits_BPV = heads.expand(hidden_BPD, tokens_BP, depth)
            guesses = logits_BPV.topk(self.top)
            log_p_BPR = guesses.values.float() - logits_BPV.float().logsumexp(-1, keepdim=True)
            scores_BPR = scores_BP[..., None] + log_p_BPR.clamp(min=LEAST) - PREFER_PARENT
            parents_BPR = places_BP[..., None].expand_as(scores_BPR)
            tokens_BM, scores_BM = guesses.indices.flatten(1), scores_BPR.flatten(1)
            proposed.append((tokens_BM, scores_BM, parents_BPR.flatten(1), torch.full_like(tokens_BM, depth + 1)))
            best_BP = scores_BM.topk(self.top).indices  # those that are expanded next
            tokens_BP, scores_BP = tokens_BM.gather(1, best_BP), scores_BM.gather(1, best_BP)
            places_BP = best_BP + num_proposed
            hidden_BPD = hidden_BPD.take_along_dim((best_BP // self.top)[..., None], 1)
            num_proposed += tokens_BM.shape[1]
        return tuple(torch.cat(column, 1) for column in zip(*proposed, strict=True))


def _tree(chosen_BM: Tensor, parents_BC: Tensor, depth_BM: Tensor, max_depth: int) -> GrownTree:
    """The trees of chosen nodes, given as places among all that were proposed, ascending."""
    num_texts, num_nodes = chosen_BM.shape
    itself_BN = torch.arange(num_nodes + 1, device=chosen_BM.device).expand(num_texts, -1)
    row_BC = torch.zeros_like(parents_BC).scatter(1, chosen_BM, itself_BN[:, 1:])
    above_BM = parents_BC.gather(1, chosen_BM)
    parent_BM = row_BC.gather(1, above_BM.clamp(min=0)).where(above_BM >= 0, 0)
    root_B1 = torch.zeros_like(parent_BM[:, :1])
    parent_BN, depth_BN = torch.cat((root_B1, parent_BM), 1), torch.cat((root_B1, depth_BM), 1)

    ancestors_BNN = torch.zeros(*itself_BN.shape, num_nodes + 1, dtype=torch.bool, device=chosen_BM.device)
    retrieve_BNT = itself_BN.new_zeros(*itself_BN.shape, max_depth + 1)
    row_BN = itself_BN
    for steps_up in range(max_depth + 1):  # past the root it stays the root
        ancestors_BNN.scatter_(2, row_BN[..., None], True)
        place_BN = (depth_BN - steps_up).clamp(min=0)
        retrieve_BNT.scatter_(2, place_BN[..., None], row_BN[..., None])
        row_BN = parent_BN.gather(1, row_BN)
    elsewhere_BNN = ~ancestors_BNN | (depth_BN == 0)[:, None]
    return GrownTree(parent_BN, depth_BN, ancestors_BNN, elsewhere_BNN, retrieve_BNT, max_depth)
