"""Decoding with heads of any kind on any transformers causal LM, and plain decoding by the same
loop.

One step is one forward of the target over the token that it chose last (the root) and a tree of the
heads' guesses, with an explicit mask and explicit positions; the longest accepted path is kept in
the text and in the KV cache (paper 2.1.2, 2.3.1). The heads read one hidden state per step: the
last accepted one, as the lm_head reads it. Model code is not modified. Plain decoding is the same
loop without a tree. On a GPU both replay CUDA graphs (see cuda_graphs.py). The acceptance rule
chooses every token, including the prefill's: greedy acceptance gives the text of greedy decoding,
rejection sampling that of plain sampling with a generator in the same state, both up to ties within
rounding.

Limits: attention by sdpa or eager (others take no custom mask); rotary or learned positions. Where
the rotary frequencies depend on the length (dynamic NTK, longrope), text that crosses the switch
may differ.

Letters: B texts, N rows (the root and the nodes), T positions of a path, D hidden size, V
    vocabulary, K heads, R ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pipeline.decoding.acceptance import AcceptanceRule, greedy_acceptance
from pipeline.decoding.cache import TreeCache, num_cached_layers
from pipeline.decoding.cuda_graphs import (
    CAPTURED_LENGTH,
    CapturedSteps,
    CudaGraphs,
    graph_capture_for,
)
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.masks import attention_windows, masks_for
from pipeline.decoding.noise import Noise
from pipeline.decoding.readout import Forward, check_pair, reading
from pipeline.decoding.steps import BatchState, TreeSteps
from pipeline.decoding.tree import Choices, Tree
from pipeline.heads.kind import Heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Decoded:
    """One decoded sequence.

    `token_ids`: the new tokens, an end token included; `accepted`: how many of them each step after
    the prefill added (the prefill adds the first). `seconds` is wall time without the prefill.
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
    """Tokens per target forward, pooled over sequences, without the prefill and its token.

    1.0 for plain decoding; NaN when no sequence took a step.
    """
    steps = [kept for one in decoded for kept in one.accepted]
    return sum(steps) / len(steps) if steps else float("nan")


class Decoder:
    """A target, its heads and their tree; decodes one text or a batch at a time and reuses its
    buffers.

    Args:
        model: A causal LM in eval mode; `heads` may be None only with an empty tree.
        choices: The tree's paths, as tuples or lists of ranks; only as many heads as it is deep are
            evaluated. Or a tree that grows in every step.
        eos_token_ids: The tokens that end a sequence.
        max_length: Limit of prompt and new tokens together; by default the model's context.
        graph_capture: Captures steps; by default CUDA graphs where the model lies on one GPU, and
            None elsewhere.

    Raises ConfigError when the heads do not belong to the target or its attention cannot verify a
    tree.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        heads: Heads | None,
        choices: Choices | DynamicTree,
        *,
        eos_token_ids: Collection[int],
        max_length: int | None = None,
        graph_capture: CudaGraphs | None = None,
    ):
        if model.training:
            raise ValueError("call model.eval() first: dropout would make decoding random")
        config = model.config.get_text_config(decoder=True)
        self.model, self.heads = model, heads
        self.device = model.get_input_embeddings().weight.device
        self.tree = choices if isinstance(choices, DynamicTree) else Tree(choices, self.device)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_length = max_length or config.max_position_embeddings
        windows = attention_windows(config)
        if self.tree.num_nodes:
            if heads is None or heads.shape.max_depth < self.tree.max_depth:
                raise ValueError(
                    f"a tree of depth {self.tree.max_depth} is deeper than these heads can propose"
                )
            check_pair(model, heads)
        masks = masks_for(self.tree, windows, self.max_length, model.dtype, self.device)
        self._cache = TreeCache(num_cached_layers(config))
        steps = TreeSteps(self.tree, heads, masks, self._cache, self.max_length)
        graph_capture = graph_capture or graph_capture_for(model)
        self._steps = CapturedSteps(steps, graph_capture) if graph_capture else steps

    @property
    def captures(self) -> bool:
        """Whether steps are captured as CUDA graphs: the first texts of a new length or batch size
        are then slower.
        """
        return self._steps.captures

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generator: torch.Generator | None = None,
    ) -> Decoded:
        """Decode until an end token, `max_new_tokens` or `max_length`.

        A rule that samples draws from `generator`; use a freshly seeded one per text, on the
        target's device, since noise is drawn a few positions ahead of the text. ValueError without
        one, or when the prompt leaves no room.
        """
        return self.generate_batch(
            [prompt_ids], max_new_tokens, rule, [generator] if generator else None
        )[0]

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generators: Sequence[torch.Generator] | None = None,
    ) -> list[Decoded]:
        """`generate` for several prompts as one batch, each with its own accepted lengths.

        Prompts are prefilled one by one, so `seconds_prefill` includes the earlier prompts'
        prefills; `seconds` counts from the last prefill. A finished text leaves the batch.
        """
        written: list[list[list[int]]] = [[] for _ in prompts]
        first, last = [0.0] * len(prompts), [0.0] * len(prompts)
        start = perf_counter()
        for step in self.stream_batch(prompts, max_new_tokens, rule, generators):
            now = perf_counter()
            for number, new_ids in step:
                written[number].append(new_ids)
                last[number] = now
                if len(written[number]) == 1:
                    first[number] = now
        return [
            Decoded(
                token_ids=[token for new_ids in steps for token in new_ids],
                finished="stop" if steps[-1][-1] in self.eos_token_ids else "length",
                accepted=[len(new_ids) for new_ids in steps[1:]],
                seconds_prefill=first[number] - start,
                seconds=max(0.0, last[number] - first[-1]),
            )
            for number, steps in enumerate(written)
        ]

    def stream(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generator: torch.Generator | None = None,
    ) -> Generator[list[int]]:
        """`generate` step by step: the prefill's token, then the tokens that each forward adds."""
        for ((_, new_ids),) in self.stream_batch(
            [prompt_ids], max_new_tokens, rule, [generator] if generator else None
        ):
            yield new_ids

    @torch.inference_mode()
    def stream_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Iterator[list[tuple[int, list[int]]]]:
        """`generate_batch` forward by forward: each text's prefill, then steps of all unfinished
        texts.

        Yields lists of (index of the text, the tokens that this forward adds to it).
        """
        texts = self._begin(prompts, max_new_tokens, rule, generators)
        with reading(self.model) as forward:
            states = []
            for prompt, text in zip(prompts, texts, strict=True):
                hidden_1D, logits_1V = self._prefill(forward, prompt)
                token_1 = rule.choose(logits_1V, text.noise.ahead(1, logits_1V))
                states.append(BatchState(hidden_1D, token_1))
                yield [(text.number, self._take(text, token_1.tolist()))]
            self._steps.start(
                BatchState(*(torch.cat(column) for column in zip(*states, strict=True)))
            )
            while places := [place for place, text in enumerate(texts) if text.room]:
                if len(places) < len(texts):
                    self._steps.drop(places)
                    texts = [texts[place] for place in places]
                noises = [text.noise.ahead(self.tree.max_depth + 1, logits_1V) for text in texts]
                noise_BTV = (
                    torch.stack([noise for noise in noises if noise is not None])
                    if rule.samples
                    else None
                )
                written = self._steps.take(forward, rule, noise_BTV)
                yield [
                    (text.number, self._take(text, ids))
                    for text, ids in zip(texts, written, strict=True)
                ]

    def _begin(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: AcceptanceRule,
        generators: Sequence[torch.Generator] | None,
    ) -> list[_Text]:
        rooms = [min(max_new_tokens, self.max_length - len(prompt)) for prompt in prompts]
        for prompt, room in zip(prompts, rooms, strict=True):
            if not prompt or room < 1:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens leaves no room within {self.max_length}"
                )
        if rule.samples and generators is None:
            raise ValueError("a rule that samples needs a generator")
        longest = max(len(prompt) + room for prompt, room in zip(prompts, rooms, strict=True))
        if self.captures:
            longest = max(longest, min(self.max_length, CAPTURED_LENGTH))
        self._cache.begin(longest + self.tree.num_nodes + 1, len(prompts))
        sources = generators if rule.samples and generators else [None] * len(prompts)
        return [
            _Text(i, room, Noise(source))
            for i, (room, source) in enumerate(zip(rooms, sources, strict=True))
        ]

    def _prefill(self, forward: Forward, prompt_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """A prompt's forward: the last hidden state [1, D] and the logits [1, V] of the first new
        token.
        """
        ids_1T = torch.tensor([prompt_ids], device=self.device)
        positions_1T = torch.arange(len(prompt_ids), device=self.device)[None]
        self._cache.open()
        hidden_11D, logits_11V = forward(ids_1T, positions_1T, None, self._cache, last_only=True)
        self._cache.keep_prompt(len(prompt_ids))
        return hidden_11D[:, 0], logits_11V[:, 0]

    def _take(self, text: _Text, ids: list[int]) -> list[int]:
        """The tokens up to and including the first end token, limited by the remaining room."""
        text.noise.advance(len(ids))
        end = next(
            (i for i, token in enumerate(ids[: text.room]) if token in self.eos_token_ids), None
        )
        kept = ids[: text.room] if end is None else ids[: end + 1]
        text.room = text.room - len(kept) if end is None else 0
        return kept


@dataclass
class _Text:
    """A text being decoded: its index, how many tokens it may still get, and its noise."""

    number: int
    room: int
    noise: Noise


def plain_decoder(
    model: PreTrainedModel, *, eos_token_ids: Collection[int], max_length: int | None = None
) -> Decoder:
    """A decoder without heads and tree: the baseline, with the same loop and cache."""
    return Decoder(model, None, (), eos_token_ids=eos_token_ids, max_length=max_length)
