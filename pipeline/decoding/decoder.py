"""Decode with a transformers causal LM and draft heads, or without heads (plain decoding).

One step is one forward pass of the target over the token that it chose last (the root) and a tree
of the heads' guesses, with an explicit mask and explicit positions; the longest accepted path is
kept in the text and in the KV cache (paper 2.1.2, 2.3.1). The heads read the state of the last
accepted token after the final norm, or several layers' outputs at all accepted tokens. Model code
is not modified. Plain decoding is the same loop without a tree. On a GPU both use CUDA graphs (see
cuda_graphs.py). The acceptance rule chooses every token, including the first one after the prefill.
Up to rounding, greedy acceptance gives the text of greedy decoding, and rejection sampling gives
the text of plain sampling with a generator in the same state.

Limits: attention must be sdpa or eager (other implementations take no custom mask), with rotary or
learned positions. If the rotary frequencies depend on the length (dynamic NTK, longrope), a text
that crosses the length where they change may differ from plain decoding.

Letters: B texts, N rows (the root and the nodes), T positions of a path, D hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from pipeline.decoding.acceptance import AcceptanceRule, Noise, greedy_acceptance
from pipeline.decoding.cache import TreeCache, round_up_slots
from pipeline.decoding.cuda_graphs import (
    CAPTURED_LENGTH,
    CapturedSteps,
    CudaGraphs,
    graph_capture_for,
)
from pipeline.decoding.drafter import Drafter
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.masks import TreeMasks, attention_windows
from pipeline.decoding.steps import BatchState, Forward, TreeSteps, forward_with_states
from pipeline.decoding.tree import Choices, Tree
from pipeline.errors import ConfigError
from pipeline.heads.kind import Heads

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TREE_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class Decoded:
    """A decoded sequence, the number of tokens that each step added, and wall times in seconds.

    Attributes:
        token_ids: The new tokens, including an end token.
        finished: `stop` after an end token, `length` at a limit.
        accepted: The number of tokens that each step after the prefill added; the prefill's one
            token is not included.
        seconds_prefill: Wall time up to the first token.
        seconds: Wall time of the steps after the prefill.
    """

    token_ids: list[int]
    finished: Literal["stop", "length"]
    accepted: list[int]
    seconds_prefill: float
    seconds: float

    @property
    def num_steps(self) -> int:
        """The number of decoding steps: the target's forward passes after the prefill."""
        return len(self.accepted)


def acceleration_rate(decoded: Iterable[Decoded]) -> float:
    """Compute the acceleration rate: tokens per forward pass after the prefill, over all sequences.

    The rate is 1.0 for plain decoding, and NaN if every sequence ended with its first token.
    """
    steps = [kept for one in decoded for kept in one.accepted]
    return sum(steps) / len(steps) if steps else float("nan")


def check_heads_fit(model: PreTrainedModel, heads: Heads) -> None:
    """Check that the heads belong to the target, and that the target's attention takes a mask.

    Raises ConfigError if hidden size or vocabulary size differ, if the heads read a layer that the
    target does not have, or if the attention is neither sdpa nor eager.
    """
    config = model.config.get_text_config(decoder=True)
    own = (config.hidden_size, config.vocab_size)
    read = (heads.shape.hidden_size, heads.shape.target_vocab_size)
    layers = heads.shape.row_layers
    if read != own or max(layers, default=0) > config.num_hidden_layers:
        raise ConfigError(
            f"The heads have hidden and vocabulary sizes {read} and read the layers {list(layers)};"
            f" the target has {own} and {config.num_hidden_layers} layers.",
            "target.model",
            "Use the heads with the target that they were trained for.",
        )
    check_takes_mask(model)


def check_takes_mask(model: PreTrainedModel) -> None:
    """Raise ConfigError if the target's attention is neither sdpa nor eager."""
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    if attention not in _TREE_ATTENTION:
        raise ConfigError(
            f"The target's attention is {attention!r}, which takes no tree mask.",
            "attn_implementation",
            f"Load the target with one of {', '.join(_TREE_ATTENTION)}.",
        )


@dataclass
class _Text:
    """A text of the batch: its index, the number of tokens it may still get, and its noise."""

    number: int
    room: int
    noise: Noise


class Decoder:
    """Decode one text or a batch with a target, its heads and a candidate tree.

    Buffers are reused between calls.

    Args:
        model: A causal LM in eval mode.
        heads: The draft heads; None only with an empty tree.
        choices: The paths of a static tree, as tuples or lists of ranks, or a dynamic tree. Only as
            many heads as the tree is deep are evaluated.
        eos_token_ids: The tokens that end a sequence.
        max_length: Limit of prompt and new tokens together; by default the model's context.
        graph_capture: CUDA graph capture; by default it is used if the model is on one GPU.

    Raises:
        ConfigError: The heads do not have the target's sizes, or the target's attention cannot
            verify a tree.
        ValueError: The heads are missing, or the tree is deeper than they can propose.
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
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.heads = heads
        self.device = model.get_input_embeddings().weight.device
        self.tree = choices if isinstance(choices, DynamicTree) else Tree(choices, self.device)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_length = max_length or config.max_position_embeddings
        self._num_rows = self.tree.num_nodes + 1  # of a step's forward, at most
        self._num_positions = self.tree.max_depth + 1  # tokens that a step adds, at most
        masks = TreeMasks(attention_windows(config), model.dtype)
        if self.tree.num_nodes:
            depth = self.tree.max_depth
            if heads is None or heads.shape.max_depth < depth:
                raise ValueError(f"a tree of depth {depth} is deeper than these heads can propose")
            check_heads_fit(model, heads)
        self._cache = TreeCache(config)
        self._drafter = Drafter(heads)
        steps = TreeSteps(self.tree, self._drafter, masks, self._cache, self.max_length)
        graph_capture = graph_capture or graph_capture_for(model)
        self._steps = CapturedSteps(steps, graph_capture) if graph_capture else steps

    @property
    def captures(self) -> bool:
        """Whether decoding steps are captured as CUDA graphs.

        With capture, the first texts of a new length or batch size are slower.
        """
        return self._steps.captures

    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generator: torch.Generator | None = None,
    ) -> Decoded:
        """Decode one prompt until an end token, `max_new_tokens` or `max_length`.

        A sampling rule draws from `generator`. Use a freshly seeded generator per text, on the
        target's device, because noise is drawn a few positions ahead of the text.

        Raises:
            ValueError: A sampling rule has no generator, or the prompt is empty or leaves no room.
        """
        generators = [generator] if generator else None
        return self.generate_batch([prompt_ids], max_new_tokens, rule, generators)[0]

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generators: Sequence[torch.Generator] | None = None,
    ) -> list[Decoded]:
        """Decode several prompts as one batch, in which each text accepts its own path.

        Prompts are prefilled one by one, so the `seconds_prefill` of a text includes the prefills
        before it; `seconds` counts from the end of the last prefill. Finished texts leave the
        batch.

        Raises:
            ValueError: A sampling rule has no generators, or a prompt is empty or leaves no room.
        """
        written: list[list[list[int]]] = [[] for _ in prompts]
        times: list[list[float]] = [[] for _ in prompts]
        start = perf_counter()
        for step in self.stream_batch(prompts, max_new_tokens, rule, generators):
            now = perf_counter()
            for number, new_ids in step:
                written[number].append(new_ids)
                times[number].append(now)
        decoded = []
        for steps, own_times in zip(written, times, strict=True):
            one = Decoded(
                token_ids=[token for new_ids in steps for token in new_ids],
                finished="stop" if steps[-1][-1] in self.eos_token_ids else "length",
                accepted=[len(new_ids) for new_ids in steps[1:]],
                seconds_prefill=own_times[0] - start,
                seconds=max(0.0, own_times[-1] - times[-1][0]),
            )
            decoded.append(one)
        return decoded

    def stream(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generator: torch.Generator | None = None,
    ) -> Generator[list[int]]:
        """Decode one prompt; yield the tokens that the prefill and then each step add.

        Arguments and errors are those of `generate`; errors are raised at the first item.
        """
        generators = [generator] if generator else None
        steps = self.stream_batch([prompt_ids], max_new_tokens, rule, generators)
        with closing(steps):
            for step in steps:
                yield step[0][1]

    @torch.inference_mode()
    def stream_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: AcceptanceRule = greedy_acceptance,
        generators: Sequence[torch.Generator] | None = None,
    ) -> Generator[list[tuple[int, list[int]]]]:
        """Decode several prompts as one batch; yield the new tokens after each forward pass.

        Forwards are one prefill per text, then steps of all unfinished texts. Each item is a list
        of (index of the text, tokens that this forward adds to the text). Arguments and errors are
        those of `generate_batch`; errors are raised at the first item.
        """
        texts = self._begin_batch(prompts, max_new_tokens, rule, generators)
        with forward_with_states(self.model, self._drafter.row_layers) as forward:
            hidden = []
            tokens = []
            for prompt, text in zip(prompts, texts, strict=True):
                read_1TX, logits_1V = self._prefill(forward, prompt)
                token_1 = rule.choose(logits_1V, text.noise.next_noise(1, logits_1V))
                hidden.append(self._drafter.read_prompt(read_1TX, prompt, token_1))
                tokens.append(token_1)
                yield [(text.number, self._cut_at_end(text, token_1.tolist()))]
            self._steps.begin_decoding(BatchState(torch.cat(hidden), torch.cat(tokens)))
            while open_texts := [text for text in texts if text.room]:
                if len(open_texts) < len(texts):
                    self._steps.drop_texts([place for place, text in enumerate(texts) if text.room])
                    texts = open_texts
                # The prefill's logits give the noise's dtype and device.
                noise_BTV = self._step_noise(texts, logits_1V)
                written = self._steps.decode_step(forward, rule, noise_BTV)
                step = []
                for text, ids in zip(texts, written, strict=True):
                    step.append((text.number, self._cut_at_end(text, ids)))
                yield step

    def _begin_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        rule: AcceptanceRule,
        generators: Sequence[torch.Generator] | None,
    ) -> list[_Text]:
        """Check the prompts of a batch, reset the KV cache for them, and return their texts.

        Raises ValueError as `generate_batch` does.
        """
        if rule.samples and generators is None:
            raise ValueError("a rule that samples needs a generator")
        texts = []
        longest = min(self.max_length, CAPTURED_LENGTH) if self.captures else 0
        for number, prompt in enumerate(prompts):
            room = min(max_new_tokens, self.max_length - len(prompt))
            if not prompt or room < 1:
                raise ValueError(
                    f"a prompt of {len(prompt)} tokens leaves no room within {self.max_length}"
                )
            generator = generators[number] if rule.samples and generators else None
            texts.append(_Text(number, room, Noise(generator)))
            longest = max(longest, len(prompt) + room)
        num_slots = round_up_slots(longest + self._num_rows)
        self._cache.begin_batch(num_slots, len(prompts))
        self._drafter.begin_batch(num_slots, len(prompts))
        return texts

    def _step_noise(self, texts: Sequence[_Text], logits_NV: Tensor) -> Tensor | None:
        """Return the sampling noise [B, T, V] of a decoding step; None without generators."""
        noises = [text.noise.next_noise(self._num_positions, logits_NV) for text in texts]
        drawn = [noise_TV for noise_TV in noises if noise_TV is not None]
        return torch.stack(drawn) if drawn else None

    def _prefill(self, forward: Forward, prompt_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Prefill one prompt into the KV cache; return what the heads read and logits [1, V].

        The heads read all positions [1, T, X] of the prompt, or the last one [1, 1, D].
        """
        ids_1T = torch.tensor([prompt_ids], device=self.device)
        positions_1T = torch.arange(len(prompt_ids), device=self.device)[None]
        self._cache.open_sequence()
        read_1TX, logits_11V = forward(ids_1T, positions_1T, None, self._cache, last_only=True)
        self._cache.keep_prompt(len(prompt_ids))
        return read_1TX, logits_11V[:, 0]

    def _cut_at_end(self, text: _Text, ids: list[int]) -> list[int]:
        """Return a step's tokens up to the first end token and the text's length limit.

        Reduces the text's room by the returned tokens, or to 0 after an end token, and discards the
        noise of the accepted positions.
        """
        text.noise.discard(len(ids))
        kept = []
        for token in ids[: text.room]:
            kept.append(token)
            text.room -= 1
            if token in self.eos_token_ids:
                text.room = 0
                break
        return kept


def plain_decoder(
    model: PreTrainedModel, *, eos_token_ids: Collection[int], max_length: int | None = None
) -> Decoder:
    """Build a decoder without heads, for plain decoding."""
    return Decoder(model, None, (), eos_token_ids=eos_token_ids, max_length=max_length)
