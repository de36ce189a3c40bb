"""Forward passes of the target with hidden states, and one decoding step (paper 2.1 and 2.3.1).

In a step the heads propose a tree per text, the target verifies the trees, and the accepted paths
are kept. The hidden states come from a hook on the lm_head. The logits come from the model itself,
so they include scaling, soft-capping and adapters around the lm_head.

Letters: B texts, N rows (the root and the nodes), T positions of a text or a path, D hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.cache import TreeCache
from pipeline.decoding.drafter import Drafter
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.masks import Masks, TreeMasks
from pipeline.decoding.tree import Tree, TreeRows
from pipeline.targets.loading import input_device, layer_outputs, lm_head_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from pipeline.decoding.grouped_attention import GroupedRows


class Forward:
    """Forward pass of the target that returns what the heads read, and the logits.

    The heads read the lm_head's inputs, or the outputs of several layers [B, T, X]. `seen` is the
    list to which a hook appends them.
    """

    def __init__(
        self, model: PreTrainedModel, attention: GroupedRows, seen: list[Tensor], reads_rows: bool
    ):
        self._model = model
        self._attention = attention
        self._seen = seen
        self._reads_rows = reads_rows

    def __call__(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        mask: Masks,
        cache: Cache,
        *,
        last_only: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Run a decoding pass; return what the heads read [B, T, X] and the logits [B, T, V].

        With `last_only`, return the logits of the last position of each text, [B, 1, V], and of the
        lm_head's inputs that of the last position, [B, 1, D].
        """
        with self._attention.grouped():
            logits_BTV = self._model(
                input_ids=ids_BT,
                position_ids=positions_BT,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                **last_logits(self._model, int(last_only)),
            ).logits
        read_BTX = self._seen.pop()
        if not last_only:
            return read_BTX, logits_BTV
        if not self._reads_rows:
            read_BTX = read_BTX[:, -1:]
        return read_BTX, logits_BTV[:, -1:]


@contextmanager
def forward_with_states(
    model: PreTrainedModel, row_layers: Sequence[int] = ()
) -> Iterator[Forward]:
    """Context manager: hook the lm_head or layers, and yield a `Forward` for decoding steps."""
    # This import loads transformers' model code, which takes seconds.
    from pipeline.decoding.grouped_attention import GroupedRows

    hooks = layer_outputs(model, row_layers) if row_layers else lm_head_inputs(model)
    with hooks as seen:
        yield Forward(model, GroupedRows(model), seen, bool(row_layers))


@torch.inference_mode()
def last_positions(
    model: PreTrainedModel, ids: Sequence[int], number: int
) -> tuple[Tensor, Tensor]:
    """Run a forward pass over a whole text without KV cache; return states and logits of its end.

    They are hidden states [number, D] and logits [number, V] at the last `number` positions. If the
    model supports `logits_to_keep`, earlier logits are not computed, which saves gigabytes for long
    texts.
    """
    ids_1T = torch.tensor([ids], device=input_device(model))
    with lm_head_inputs(model) as seen:
        logits_1TV = model(input_ids=ids_1T, use_cache=False, **last_logits(model, number)).logits
    return seen[-1][0, -number:], logits_1TV[0, -number:]


def last_logits(model: PreTrainedModel, num_logits: int) -> dict[str, int]:
    """Return the keyword argument `logits_to_keep`; an empty dictionary if it is not supported.

    0 keeps the logits of all positions.
    """
    if "logits_to_keep" in signature(model.forward).parameters:
        return {"logits_to_keep": num_logits}
    return {}


class BatchState(NamedTuple):
    """Decoding state of a batch: the heads' next input states and the last chosen tokens."""

    hidden_BD: Tensor
    token_B: Tensor

    def at(self, texts: Sequence[int]) -> BatchState:
        """Select the decoding state of the texts at these batch indices."""
        return BatchState(self.hidden_BD[texts], self.token_B[texts])


class TreeSteps:
    """Decoding steps of a batch, without CUDA graphs."""

    captures = False  # whether steps are captured as CUDA graphs

    def __init__(
        self,
        tree: Tree | DynamicTree,
        drafter: Drafter,
        masks: TreeMasks,
        cache: TreeCache,
        max_length: int,
    ):
        self.tree = tree
        self.drafter = drafter
        self.masks = masks
        self.cache = cache
        self.max_length = max_length

    def begin_decoding(self, state: BatchState) -> None:
        """Set the batch's decoding state after the prefill; the KV cache holds the prompts."""
        self.state = state

    def drop_texts(self, kept: Sequence[int]) -> None:
        """Drop finished texts from the decoded batch; keep the ascending indices `kept`."""
        self.cache.drop_sequences(kept)
        self.drafter.keep(kept)
        self.state = self.state.at(kept)

    def decode_step(
        self, forward: Forward, rule: AcceptanceRule, noise_BTV: Tensor | None
    ) -> list[list[int]]:
        """Take one decoding step without CUDA graphs; return the tokens that it adds to each text.

        `noise_BTV` is the sampling noise, or None for a rule that does not sample.
        """
        lengths = self.cache.lengths
        tree, tokens_BN = self.propose_trees()
        length_B = torch.tensor(lengths, device=tokens_BN.device)
        # Rows beyond the limit are cut later, but their position ids must be valid.
        positions_BN = (tree.depth + length_B[:, None]).clamp_(max=self.max_length - 1)
        mask = None
        if tree.max_depth or len(lengths) > 1:
            mask = self.masks.masks_of_step(lengths, tree)
        read = forward(tokens_BN, positions_BN, mask, self.cache)
        self.state, found = self.accept_paths(*read, tokens_BN, tree, rule, noise_BTV)
        return self.read_tokens(found)

    def propose_trees(self) -> tuple[TreeRows, Tensor]:
        """Propose one candidate tree per text; return the trees and their rows' tokens [B, N].

        In plain decoding a tree is only the root.
        """
        hidden_BD, token_B = self.state
        if isinstance(self.tree, Tree) and not self.tree.num_nodes:
            return self.tree, token_B[:, None]
        return self.drafter.grow(self.tree, hidden_BD, token_B)

    def accept_paths(
        self,
        read_BNX: Tensor,
        logits_BNV: Tensor,
        tokens_BN: Tensor,
        tree: TreeRows,
        rule: AcceptanceRule,
        noise_BTV: Tensor | None,
    ) -> tuple[BatchState, Tensor]:
        """Accept one path per candidate tree with the rule, and keep its rows in the KV cache.

        Returns the new state, and the tensor [B, T + 2] that the host reads: for each text the
        depth of the accepted row, the padded tokens from the root to this row, and the next token.
        """
        if not tree.max_depth:
            noise_BV = None if noise_BTV is None else noise_BTV[:, 0]
            token_B = rule.choose(logits_BNV[:, 0], noise_BV)
            found = torch.stack((torch.zeros_like(token_B), tokens_BN[:, 0], token_B), 1)
            return BatchState(read_BNX[:, 0], token_B), found
        row_B, token_B = rule.accept(logits_BNV, tokens_BN, tree, noise_BTV)
        rows_BT = tree.path_to(row_B)
        self.cache.move_accepted_rows(rows_BT)
        depth_B1 = tree.depth_of(row_B)[:, None]
        path_BT = tokens_BN.gather(1, rows_BT)
        # The token after each row: the next one of the path, and after the last row the new one.
        next_BT = torch.cat((path_BT[:, 1:], token_B[:, None]), 1)
        next_BT = next_BT.scatter(1, depth_B1, token_B[:, None])
        read_BTX = read_BNX.take_along_dim(rows_BT[..., None].to(read_BNX.device), 1)
        hidden_BD = self.drafter.read_paths(read_BTX, next_BT, depth_B1[:, 0] + 1)
        return BatchState(hidden_BD, token_B), torch.cat((depth_B1, path_BT, token_B[:, None]), 1)

    def read_tokens(self, found: Tensor) -> list[list[int]]:
        """Return the tokens that a decoding step adds to each text, and extend cached lengths.

        `found` is the tensor of `accept_paths`. Reading it is the step's only transfer to the host.
        """
        written = []
        for depth, _, *tokens in found.tolist():
            written.append([*tokens[:depth], tokens[-1]])
        self.cache.extend_lengths([len(tokens) for tokens in written])
        return written
