"""A tree that grows anew in every step, along the paths that the heads themselves find probable.

EAGLE-2 (arXiv 2406.16858, section 4): level by level the `top` most probable nodes get their `top`
best guesses each, a node's probability being the product of the heads' own along its path; of all
nodes that were so proposed the `num_nodes` most probable are verified. A static tree spends its
nodes where guesses were right most often on held-out text; this one, where they are likely to be
right here. Shapes are the same in every step, and nothing is decided on the host, so that a step
can be captured as a CUDA graph.

Letters: B texts, N rows (the root and the nodes), T positions of a path with its root, C proposed
nodes, P nodes that are expanded, R guesses per node, D hidden size, V vocabulary, K depths.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from pipeline.decoding.tree import Choices, TreePath, check_choices
from pipeline.errors import ConfigError
from pipeline.heads.kind import Heads

NEVER = torch.iinfo(torch.int16).max  # the place of a node that is not proposed
# Subtracted per depth, so that of equals a parent comes before its child. No guess is held less
# probable than e^-100, lest fp32 lose it.
PREFER_PARENT, LEAST = 1e-3, -100.0


@dataclass(frozen=True)
class GrownTree:
    """The trees of one step; as of `Tree`, with one tree per text: `parent` and `depth` [B, N],
    `ancestors` and `elsewhere` [B, N, N], `retrieve_indices` [B, N, T]."""

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
    """How trees grow: `num_nodes` of them besides the root, at most `max_depth` deep, `top` guesses
    per node.

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

    def resized(self, num_nodes: int, max_depth: int | None = None) -> DynamicTree:
        """The same rule with at most so many nodes, as far as they are proposed, up to another
        depth.
        """
        widest = replace(self, num_nodes=1, max_depth=max_depth or self.max_depth)
        return replace(widest, num_nodes=min(num_nodes, widest.num_proposed))

    def described(self) -> str:
        return f"a dynamic tree of {self.num_nodes} nodes"

    def grow(self, heads: Heads, hidden_BD: Tensor, token_B: Tensor) -> tuple[GrownTree, Tensor]:
        """The trees, and the tokens [B, N] of their rows."""
        proposed = self.propose(heads, hidden_BD, token_B.to(hidden_BD.device))
        tokens_BC, scores_BC, parents_BC, depth_BC = (
            column.to(token_B.device) for column in proposed
        )
        chosen_BM = (
            scores_BC.topk(self.num_nodes).indices.sort(1).values
        )  # parents were proposed before children
        tree = _tree(chosen_BM, parents_BC, depth_BC.gather(1, chosen_BM), self.max_depth)
        return tree, torch.cat((token_B[:, None], tokens_BC.gather(1, chosen_BM)), 1)

    def propose(self, heads: Heads, hidden_BD: Tensor, token_B: Tensor) -> tuple[Tensor, ...]:
        """All proposed nodes, depth after depth: their tokens, log probabilities, parents and
        depths, each [B, C].

        Log probabilities are those of whole paths, less a little per depth; the root is the parent
        -1.
        """
        hidden_BPD, tokens_BP = hidden_BD[:, None], token_B[:, None]
        scores_BP = torch.zeros_like(tokens_BP, dtype=torch.float32)
        places_BP = torch.full_like(tokens_BP, -1)
        proposed: list[tuple[Tensor, ...]] = []
        num_proposed = 0
        for depth in range(self.max_depth):
            hidden_BPD, logits_BPV = heads.expand(hidden_BPD, tokens_BP, depth)
            rows_BPR, log_p_BPR = _best(logits_BPV, self.top)
            guesses_BPR = heads.vocabulary.tokens(rows_BPR)
            scores_BPR = scores_BP[..., None] + log_p_BPR.clamp(min=LEAST) - PREFER_PARENT
            parents_BPR = places_BP[..., None].expand_as(scores_BPR)
            tokens_BM, scores_BM = guesses_BPR.flatten(1), scores_BPR.flatten(1)
            proposed.append(
                (
                    tokens_BM,
                    scores_BM,
                    parents_BPR.flatten(1),
                    torch.full_like(tokens_BM, depth + 1),
                )
            )
            best_BP = scores_BM.topk(self.top).indices  # those that are expanded next
            tokens_BP, scores_BP = tokens_BM.gather(1, best_BP), scores_BM.gather(1, best_BP)
            places_BP = best_BP + num_proposed
            hidden_BPD = hidden_BPD.take_along_dim((best_BP // self.top)[..., None], 1)
            num_proposed += tokens_BM.shape[1]
        return tuple(torch.cat(column, 1) for column in zip(*proposed, strict=True))

    @torch.no_grad()
    def places(
        self,
        heads: Heads,
        hidden_BD: Tensor,
        token_B: Tensor,
        labels_KB: Tensor,
        *,
        chunk_bytes: int = 64 << 20,
    ) -> Tensor:
        """Where the node of each true token stands by probability among all that are proposed,
        int16 [max_depth, B].

        A tree of n nodes verifies those whose place is below n: one pass judges trees of every
        size. `NEVER` where it is not proposed, or a token above it is not, or the label is -100.

        Args:
            hidden_BD, token_B: The target's states at positions t, and the tokens at t+1, the
            roots.
            labels_KB: The tokens at t+2+k.
        """
        num_texts = max(1, chunk_bytes // (4 * self.top * heads.shape.vocab_size))
        labels_KB = labels_KB[: self.max_depth]
        chunks = zip(
            hidden_BD.split(num_texts),
            token_B.split(num_texts),
            labels_KB.split(num_texts, 1),
            strict=True,
        )
        return torch.cat(
            [_true_places(self.propose(heads, *roots), labels) for *roots, labels in chunks], 1
        )


def check_tree(
    tree: Choices | DynamicTree, max_depth: int, top: int
) -> tuple[TreePath, ...] | DynamicTree:
    """The tree, as paths or as the rule by which it grows.

    Raises ConfigError unless heads that propose `max_depth` tokens ahead, `top` guesses of each,
    can fill it.
    """
    if not isinstance(tree, DynamicTree):
        return check_choices(tree, max_depth, top)
    if tree.max_depth > max_depth or tree.top > top:
        raise ConfigError(
            f"A dynamic tree of depth {tree.max_depth} with {tree.top} guesses per node is asked"
            f" for, and the heads propose {max_depth} tokens ahead, of {top}.",
            "tree",
            "Lower calibrate.depth or calibrate.top.",
        )
    return tree


def _best(logits_BPV: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The rows [B, P, R] of the `top` largest logits, and their log probabilities."""
    num_nodes = logits_BPV.shape[1]
    if (
        logits_BPV.stride(1) == 0
    ):  # the guesses of such heads are the same below every node: they are looked at once
        logits_BPV = logits_BPV[:, :1]
    best = logits_BPV.topk(top)
    log_p_BPR = best.values.float() - logits_BPV.float().logsumexp(-1, keepdim=True)
    return best.indices.expand(-1, num_nodes, -1), log_p_BPR.expand(-1, num_nodes, -1)


def _true_places(proposed: tuple[Tensor, ...], labels_KB: Tensor) -> Tensor:
    """The places [K, B] of the nodes on the true paths."""
    tokens_BC, scores_BC, parents_BC, _ = proposed
    order_BC = scores_BC.argsort(1, descending=True)
    by_place_BC = torch.arange(order_BC.shape[1], device=order_BC.device).expand_as(order_BC)
    place_BC = torch.empty_like(order_BC).scatter_(1, order_BC, by_place_BC)
    node_B1 = torch.full_like(order_BC[:, :1], -1)  # the root
    places = []
    for labels_B in labels_KB:
        right_BC = (parents_BC == node_B1) & (tokens_BC == labels_B[:, None])
        node_B1 = right_BC.int().argmax(1, keepdim=True).where(right_BC.any(1, keepdim=True), -2)
        places.append(
            place_BC.gather(1, node_B1.clamp(min=0))
            .where(node_B1 >= 0, NEVER)
            .clamp(max=NEVER)[:, 0]
        )
    return torch.stack(places).to(torch.int16)


def _tree(chosen_BM: Tensor, parents_BC: Tensor, depth_BM: Tensor, max_depth: int) -> GrownTree:
    """The trees of chosen nodes, given as places among all that were proposed, ascending."""
    num_texts, num_nodes = chosen_BM.shape
    itself_BN = torch.arange(num_nodes + 1, device=chosen_BM.device).expand(num_texts, -1)
    row_BC = torch.zeros_like(parents_BC).scatter(1, chosen_BM, itself_BN[:, 1:])
    above_BM = parents_BC.gather(1, chosen_BM)
    parent_BM = row_BC.gather(1, above_BM.clamp(min=0)).where(above_BM >= 0, 0)
    root_B1 = torch.zeros_like(parent_BM[:, :1])
    parent_BN, depth_BN = torch.cat((root_B1, parent_BM), 1), torch.cat((root_B1, depth_BM), 1)

    ancestors_BNN = torch.zeros(
        *itself_BN.shape, num_nodes + 1, dtype=torch.bool, device=chosen_BM.device
    )
    retrieve_BNT = itself_BN.new_zeros(*itself_BN.shape, max_depth + 1)
    row_BN = itself_BN
    for steps_up in range(max_depth + 1):  # past the root it stays the root
        ancestors_BNN.scatter_(2, row_BN[..., None], True)
        place_BN = (depth_BN - steps_up).clamp(min=0)
        retrieve_BNT.scatter_(2, place_BN[..., None], row_BN[..., None])
        row_BN = parent_BN.gather(1, row_BN)
    elsewhere_BNN = ~ancestors_BNN | (depth_BN == 0)[:, None]
    return GrownTree(parent_BN, depth_BN, ancestors_BNN, elsewhere_BNN, retrieve_BNT, max_depth)
