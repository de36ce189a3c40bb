"""Decoding with Medusa heads on any transformers causal LM, and plain decoding with equal care.

One step is one forward of the target over the token that it chose last (the root) and a tree of the heads' guesses,
under an explicit mask and explicit positions; the longest accepted path is kept, in the tokens and in the KV cache
(paper 2.1.2, 2.3.1). The heads read one hidden state per step: the last accepted one, exactly as the lm_head reads
it. No model code is touched. Plain decoding is the same loop with no tree. The acceptance rule decides every token,
the prefill's too: greedy acceptance writes what greedy decoding writes, and rejection sampling what plain sampling
writes with a generator in the same state, both up to ties within rounding.

Limits: one sequence at a time; attention by sdpa or eager (others take no custom mask); rotary or learned positions.
Where the rotary frequencies depend on the length (dynamic NTK, longrope), text that crosses their switch may differ.

Letters: N rows (the root and the nodes), D hidden size, V vocabulary, K heads, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.medusa.acceptance import AcceptanceRule, greedy_acceptance
from pipeline.medusa.cache import TreeCache, num_cached_layers
from pipeline.medusa.heads import MedusaHeads
from pipeline.medusa.masks import TreeMasks, attention_windows
from pipeline.medusa.readout import Forward, check_pair, reading
from pipeline.medusa.sampling import Noise
from pipeline.medusa.tree import Path, Tree


@dataclass(frozen=True)
class Decoded:
    """One decoded sequence.

    `token_ids`: the new tokens, an end token included; `accepted`: how many of them each step after the prefill gave,
    after cuts; the prefill gave the first. Seconds are wall time, `seconds` without the prefill.
    """

    token_ids: list[int]
    finished: Literal["stop", "length"]
    accepted: list[int]
    seconds_prefill: float
    seconds: float

    @property
    def num_steps(self) -> int:
        """Target forwards after the prefill."""
        return len(self.accepted)


def acceleration_rate(decoded: Iterable[Decoded]) -> float:
    """Tokens kept per target forward, pooled over sequences; the prefill and its token are not counted.

    Plain decoding has 1.0. NaN when no sequence took a step.
    """
    steps = [kept for one in decoded for kept in one.accepted]
    return sum(steps) / len(steps) if steps else float("nan")


class MedusaDecoder:
    """A target, its heads and their tree, ready to decode one sequence after another. Buffers are built once.

    Args:
        model: A causal LM in eval mode; `heads` may be None only with an empty tree.
        choices: The tree's paths; only as many heads as it is deep are evaluated.
        eos_token_ids: The tokens that end a sequence.
        max_length: Prompt and new tokens together; by default the model's context.

    Raises ConfigError when the heads do not belong to the target or its attention cannot verify a tree.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        heads: MedusaHeads | None,
        choices: Iterable[Path],
        *,
        eos_token_ids: Collection[int],
        max_length: int | None = None,
    ):
        if model.training:
            raise ValueError("call model.eval() first: dropout would make decoding random")
        config = model.config.get_text_config(decoder=True)
        device = model.get_input_embeddings().weight.device
        self.model, self.heads = model, heads
        self.tree = Tree(choices, device)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_length = max_length or config.max_position_embeddings
        windows = attention_windows(config)
        if self.tree.num_nodes:
            if heads is None or heads.config.num_heads < self.tree.max_depth:
                raise ValueError(f"a tree of depth {self.tree.max_depth} needs as many heads")
            check_pair(model, heads)
            self._masks = TreeMasks(self.tree, windows, self.max_length, model.dtype, device)
        self._cache = TreeCache(num_cached_layers(config))
        self._tokens_N = torch.zeros(self.tree.num_nodes + 1, dtype=torch.int64, device=device)

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generator: torch.Generator | None = None,
    ) -> Decoded:
        """Decodes until an end token, `max_new_tokens` or `max_length`.

        A rule that samples draws from `generator`, best a freshly seeded one per text and on the target's device: it
        is left some positions ahead of the text's end. ValueError when it lacks one or the prompt leaves no room.
        """
        token_ids: list[int] = []
        accepted: list[int] = []
        start = first = perf_counter()
        for new_ids in self.stream(prompt_ids, max_new_tokens, rule, generator):
            if not token_ids:
                first = perf_counter()
            else:
                accepted.append(len(new_ids))
            token_ids += new_ids
        finished: Literal["stop", "length"] = "stop" if token_ids[-1] in self.eos_token_ids else "length"
        return Decoded(token_ids, finished, accepted, first - start, perf_counter() - first)

    @torch.inference_mode()
    def stream(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generator: torch.Generator | None = None,
    ) -> Iterator[list[int]]:
        """The same, step by step: first the prefill's token, then what each forward adds, already cut."""
        room = min(max_new_tokens, self.max_length - len(prompt_ids))
        if not prompt_ids or room < 1:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens leaves no room within {self.max_length}")
        if rule.samples and generator is None:
            raise ValueError("a rule that samples needs a generator")
        noise = Noise(generator if rule.samples else None)
        with reading(self.model) as forward:
            hidden_1D, logits_1V = self._prefill(forward, prompt_ids, room)
            token = rule.choose(logits_1V, noise.ahead(1, logits_1V))[0]
            new_ids = [int(token)]
            while True:
                noise.advance(len(new_ids))
                new_ids = self._cut(new_ids, room)
                room -= len(new_ids)
                yield new_ids
                if room == 0 or new_ids[-1] in self.eos_token_ids:
                    return
                self._propose(hidden_1D, token)
                hidden_1D, token, new_ids = self._verify(forward, rule, noise)

    def _prefill(self, forward: Forward, prompt_ids: Sequence[int], room: int) -> tuple[Tensor, Tensor]:
        """The prompt's forward: the state that the heads read next, and the logits of the first token."""
        num_tokens = len(prompt_ids)
        self._cache.begin(num_tokens + room + len(self._tokens_N))
        ids_T = torch.tensor(prompt_ids, device=self._tokens_N.device)
        positions_T = torch.arange(num_tokens, device=ids_T.device)
        hidden_1D, logits_1V = forward(ids_T, positions_T, None, self._cache, last_only=True)
        self._cache.keep_prompt(num_tokens)
        return hidden_1D, logits_1V

    def _propose(self, hidden_1D: Tensor, token: Tensor) -> None:
        """Writes the next root and, below it, the heads' guesses into the tree's rows."""
        self._tokens_N[0] = token
        if self.tree.num_nodes:
            assert self.heads is not None
            hidden_1D = hidden_1D.to(self.heads.block_weight.device)  # a target over several GPUs ends on another
            logits_KV = self.heads(hidden_1D, self.tree.max_depth)[:, 0]
            guesses_KR = logits_KV.topk(self.tree.top).indices
            self._tokens_N[1:] = guesses_KR.flatten()[self.tree.guess.to(guesses_KR.device)]

    def _verify(self, forward: Forward, rule: AcceptanceRule, noise: Noise) -> tuple[Tensor, Tensor, list[int]]:
        """One forward over the tree; keeps the accepted path; one transfer from the device."""
        tree, prefix = self.tree, self._cache.length
        positions_N = tree.depth + prefix
        if prefix + tree.max_depth >= self.max_length:  # such nodes are cut, but must not overrun a table of positions
            positions_N.clamp_(max=self.max_length - 1)
        mask = self._masks.after(prefix) if tree.num_nodes else None
        hidden_ND, logits_NV = forward(self._tokens_N, positions_N, mask, self._cache)
        noise_TV = noise.ahead(tree.max_depth + 1, logits_NV)
        if not tree.num_nodes:
            token = rule.choose(logits_NV, noise_TV)[0]
            rows, new_ids, hidden_1D = [0], [int(token)], hidden_ND
        else:
            row, token = rule.judge(logits_NV, self._tokens_N, tree, noise_TV)
            path_ids = self._tokens_N[tree.lineage.index_select(0, row[None])[0]]  # indexing by `row` would fetch it
            chosen, *path = torch.cat((row[None], path_ids, token[None])).tolist()
            rows, hidden_1D = tree.lineages[chosen], hidden_ND[chosen : chosen + 1]
            new_ids = [*path[1 : len(rows)], path[-1]]
        self._cache.keep(rows, tree.lineage[rows[-1]])
        return hidden_1D, token, new_ids

    def _cut(self, ids: list[int], room: int) -> list[int]:
        """The tokens up to and with the first end token, at most `room`."""
        return ids[: next((i + 1 for i, token in enumerate(ids[:room]) if token in self.eos_token_ids), room)]


def plain_decoder(
    model: PreTrainedModel, *, eos_token_ids: Collection[int], max_length: int | None = None
) -> MedusaDecoder:
    """The decoder without heads and tree: the baseline, by the same loop and cache."""
    return MedusaDecoder(model, None, (), eos_token_ids=eos_token_ids, max_length=max_length)
