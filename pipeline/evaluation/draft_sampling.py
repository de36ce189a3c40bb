"""Speculative sampling with a smaller model, the classical one: its text is distributed as the target's own.

The draft model samples a few tokens from its distributions q; one forward of the target gives p at each of them. A
token x is kept with probability min(1, p(x) / q(x)). The first that is not is replaced by one from the normalised
positive part of p - q, and after the last a further one is drawn from p (Leviathan et al., arXiv 2211.17192; Chen et
al., 2302.01318).

Letters: N drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from pipeline.decoding.decoder import Decoded
from pipeline.evaluation.speed import code_of_others
from pipeline.targets.loading import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NUM_DRAFTED = 5  # per step, as in both papers' experiments


def kept_and_next(
    p_MV: Tensor, q_NV: Sequence[Tensor] | Tensor, drafted_N: Sequence[int], generator: torch.Generator
) -> list[int]:
    """The drafted tokens that are kept, and the token after them.

    Args:
        p_MV: The target's distributions at each drafted token and after the last, M = N + 1.
        q_NV: Those that the tokens were drawn from.
    """
    kept: list[int] = []
    for p_V, q_V, token in zip(p_MV, q_NV, drafted_N, strict=False):
        chance = torch.rand((), generator=generator, device=generator.device)
        if float(chance) * float(q_V[token]) >= float(p_V[token]):  # chance < p / q, without a division by 0
            rest_V = (p_V - q_V).clamp(min=0)
            return [*kept, _draw(rest_V if rest_V.sum() > 0 else p_V, generator)]
        kept.append(token)
    return [*kept, _draw(p_MV[len(kept)], generator)]


def _draw(p_V: Tensor, generator: torch.Generator) -> int:
    return int(torch.multinomial(p_V, 1, generator=generator))


class DraftSampling:
    """Decodes by speculative sampling, and counts what was drafted and kept."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_new_tokens: int,
        temperature: float,
    ):
        self.target, self.draft, self.eos = target, draft, set(eos_token_ids)
        self.max_new_tokens, self.temperature = max_new_tokens, temperature
        self.num_steps = self.num_drafted = self.num_kept = 0

    @property
    def facts(self) -> dict[str, float]:
        """The share of drafted tokens that were kept, and how many were drafted per step."""
        return {
            "acceptance": round(self.num_kept / max(1, self.num_drafted), 4),
            "draft_length": round(self.num_drafted / max(1, self.num_steps), 4),
            "temperature": self.temperature,
        }

    @torch.inference_mode()
    def __call__(self, prompt_ids: list[int], seed: int) -> Decoded:
        """A sampled answer; CannotDecode where one of the models or its cache does not take part."""
        start = perf_counter()
        generator = torch.Generator(input_device(self.target)).manual_seed(seed)
        with code_of_others():
            caches = {model: DynamicCache(config=model.config) for model in (self.target, self.draft)}
        p_1V = self._distributions(self.target, caches, prompt_ids, 1)
        ids, accepted = [*prompt_ids, _draw(p_1V[0], generator)], list[int]()
        began = perf_counter()
        while not self._over(ids, len(prompt_ids)):
            room = self.max_new_tokens - (len(ids) - len(prompt_ids))
            tokens = self._step(ids, caches, min(NUM_DRAFTED, room - 1), generator)
            end = next((place + 1 for place, token in enumerate(tokens) if token in self.eos), len(tokens))
            ids += tokens[:end]
            accepted.append(end)
        written = ids[len(prompt_ids) :]
        finished: Literal["stop", "length"] = "stop" if written[-1] in self.eos else "length"
        return Decoded(written, finished, accepted, began - start, perf_counter() - began)

    def _step(
        self,
        ids: list[int],
        caches: dict[PreTrainedModel, DynamicCache],
        num_drafted: int,
        generator: torch.Generator,
    ) -> list[int]:
        drafted: list[int] = []
        q: list[Tensor] = []
        for _ in range(num_drafted):
            q.append(self._distributions(self.draft, caches, ids + drafted, 1)[0])
            drafted.append(_draw(q[-1], generator))
        p_MV = self._distributions(self.target, caches, ids + drafted, num_drafted + 1)
        size = min([p_MV.shape[-1], *(len(q_V) for q_V in q)])  # one vocabulary may be padded
        tokens = kept_and_next(p_MV[:, :size], [q_V[:size] for q_V in q], drafted, generator)
        with code_of_others():
            for cache in caches.values():
                cache.crop(min(cache.get_seq_length(), len(ids) + len(tokens) - 1))
        self.num_steps, self.num_drafted = self.num_steps + 1, self.num_drafted + num_drafted
        self.num_kept += len(tokens) - 1
        return tokens

    def _distributions(
        self, model: PreTrainedModel, caches: dict[PreTrainedModel, DynamicCache], ids: list[int], last: int
    ) -> Tensor:
        """The model's distributions [last, V] after the last tokens, of which its cache lacks at least so many."""
        cache, device = caches[model], input_device(model)
        known = cache.get_seq_length()
        ids_1T = torch.tensor([ids[known:]], device=device)
        with code_of_others():
            logits = model(input_ids=ids_1T, past_key_values=cache, use_cache=True).logits[0, -last:]
        return (logits.float() / self.temperature).softmax(-1).to(input_device(self.target))

    def _over(self, ids: list[int], num_read: int) -> bool:
        return ids[-1] in self.eos or len(ids) - num_read >= self.max_new_tokens
