"""Decoding with candidate trees that are retrieved from text, without heads.

In each step the drafter proposes one tree from the tokens so far, and the target verifies it as it
verifies the trees of heads (see decoder.py). A tree depends on the tokens so far, never on the
sampling noise of later tokens. So every acceptance rule keeps what it keeps with heads: greedy
acceptance the text of greedy decoding, rejection sampling the target's distribution.

Limits: one text at a time, and no CUDA graphs, because a drafter runs on the host and its trees
differ in size.

Letters: B texts (here 1), N rows (the root and the nodes).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.decoding.acceptance import AcceptanceRule, greedy_acceptance
from pipeline.decoding.cache import TreeCache
from pipeline.decoding.decoder import Decoder, check_takes_mask
from pipeline.decoding.drafter import Drafter
from pipeline.decoding.masks import TreeMasks, attention_windows
from pipeline.decoding.retrieval import MAX_DEPTH, Retrieval
from pipeline.decoding.steps import BatchState, TreeSteps
from pipeline.decoding.tree import Tree, TreeRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DraftedSteps(TreeSteps):
    """Decoding steps of one text, with the candidate trees of a drafter.

    `root` is the tree without nodes, which is verified when the drafter has no guess.
    """

    def __init__(
        self, drafter: Retrieval, root: Tree, masks: TreeMasks, cache: TreeCache, max_length: int
    ):
        super().__init__(root, Drafter(None), masks, cache, max_length)
        self._root = root
        self._drafter = drafter

    def begin_decoding(self, state: BatchState) -> None:
        """Set the decoding state after the prefill, and pass its token to the drafter."""
        super().begin_decoding(state)
        self._drafter.text += state.token_B.tolist()

    def propose_trees(self) -> tuple[TreeRows, Tensor]:
        """Return the drafted candidate tree, and the tokens [1, N] of its rows."""
        draft = self._drafter.draft()
        token_11 = self.state.token_B[:, None]
        if not draft.tokens:
            return self._root, token_11
        guesses_1N = torch.tensor([draft.tokens], device=token_11.device)
        return draft.rows(token_11.device), torch.cat((token_11, guesses_1N), 1)

    def read_tokens(self, found: Tensor) -> list[list[int]]:
        """Return the tokens that the decoding step adds, and pass them to the drafter."""
        written = super().read_tokens(found)
        self._drafter.text += written[0]
        return written


class DraftDecoder(Decoder):
    """Decode texts with a target and a drafter, one text at a time.

    Args:
        model: A causal LM in eval mode.
        drafter: The proposer of candidate trees.
        eos_token_ids: The tokens that end a sequence.
        max_length: Limit of prompt and new tokens together; by default the model's context.

    Raises:
        ConfigError: The target's attention cannot verify a tree.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Retrieval,
        *,
        eos_token_ids: Collection[int],
        max_length: int | None = None,
    ):
        check_takes_mask(model)
        super().__init__(model, None, (), eos_token_ids=eos_token_ids, max_length=max_length)
        self.drafter = drafter
        self._num_rows = drafter.num_nodes + 1
        self._num_positions = MAX_DEPTH + 1
        masks = TreeMasks(attention_windows(model.config), model.dtype)
        root = Tree((), self.device)
        self._steps = DraftedSteps(drafter, root, masks, self._cache, self.max_length)

    def stream_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Generator[list[tuple[int, list[int]]]]:
        """Decode one prompt as `Decoder.stream_batch` does; raise ValueError for several."""
        if len(prompts) != 1:
            raise ValueError(f"a drafter proposes for one text at a time, not for {len(prompts)}")
        self.drafter.text = list(prompts[0])
        yield from super().stream_batch(prompts, max_new_tokens, rule, generators)
