"""Generation with any transformers causal LM: one batch with a KV cache that rows join and leave
while it runs.

For targets that vLLM does not load, and for machines without it. Rows are left-padded; a step
either prefills waiting requests and adds them to the batch, or decodes one token for each row.
There is no prefix cache: each turn prefills its whole history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from pipeline.conversations.requests import Completion, Finish, Request
from pipeline.errors import EnvironmentFault
from pipeline.targets.engines import check_request
from pipeline.targets.loading import input_device, load_causal_lm
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids

# B batch, T cached positions, V vocabulary

MAX_BATCH_TOKENS = 65_536


@dataclass
class _Row:
    """One running request."""

    request: Request
    limit: int
    generator: torch.Generator | None
    token_ids: list[int] = field(default_factory=list)


class TransformersGenerationEngine:
    """The GenerationEngine for everything that transformers loads.

    Args:
        spec: The target.
        max_batch_tokens: Budget of the KV cache: rows times the longest row's prompt and answer.
        gpus: GPUs that the target spans; 0 is the CPU.

    Raises:
        ConfigError, EnvironmentFault: As `load_causal_lm` does.
    """

    def __init__(
        self, spec: TargetSpec, *, max_batch_tokens: int = MAX_BATCH_TOKENS, gpus: int = 0
    ):
        self.model = load_causal_lm(spec, "cuda" if gpus else "cpu", max(gpus, 1))
        self.max_batch_tokens = max_batch_tokens
        self._context = context_length(spec)
        self.capacity = 4 * max(
            1, max_batch_tokens // self._context
        )  # rows are rarely as long as the context
        self._eos = frozenset(eos_token_ids(spec))
        self._device = input_device(self.model)
        self._last_only = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        self._waiting: deque[Request] = deque()
        self._ids: set[str] = set()
        self._clear()

    def add(self, request: Request) -> None:
        check_request(request, self._context, self._ids)
        self._ids.add(request.id)
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Prefill and add waiting requests, or decode one token for each running row; returns
        finished texts.

        Raises:
            EnvironmentFault: A single request does not fit into the GPU's memory.
        """
        try:
            # Joining copies the cache, so a few requests wait for more.
            if (
                self._waiting
                and len(self._waiting) >= len(self._rows) // 4
                and (joining := self._admit())
            ):
                return self._prefill(joining)
            return self._decode() if self._rows else []
        except torch.cuda.OutOfMemoryError as error:
            if len(self._rows) <= 1:
                fix = (
                    "Lower target.max_tokens or generate.max_new_tokens, raise gpus_per_worker, or"
                    " quantize the target."
                )
                raise EnvironmentFault(
                    "One conversation exceeds the GPU's memory.", "generate", fix
                ) from error
        # Rows start again from their own seeds and give the same text.
        self.max_batch_tokens //= 2
        self._waiting.extendleft(row.request for row in reversed(self._rows))
        self._clear()
        torch.cuda.empty_cache()
        return []

    def close(self) -> None:
        self._clear()
        del self.model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _clear(self) -> None:
        self._rows: list[_Row] = []
        self._cache = DynamicCache()
        self._mask_BT = torch.ones(0, 0, dtype=torch.long, device=self._device)

    def _admit(self) -> list[_Row]:
        """Waiting requests that fit beside the running rows, in order; at least one when nothing
        runs.
        """
        width = self._mask_BT.shape[1]
        remaining = max((row.limit - len(row.token_ids) for row in self._rows), default=0)
        admitted: list[_Row] = []
        while self._waiting:
            request = self._waiting[0]
            limit = min(request.max_new_tokens, self._context - len(request.prompt_ids))
            width, remaining = max(width, len(request.prompt_ids)), max(remaining, limit)
            num_rows = len(self._rows) + len(admitted) + 1
            if num_rows > 1 and num_rows * (width + remaining) > self.max_batch_tokens:
                break
            self._waiting.popleft()
            seed = request.seed
            generator = None if seed is None else torch.Generator(self._device).manual_seed(seed)
            admitted.append(_Row(request, limit, generator))
        return admitted

    @torch.inference_mode()
    def _prefill(self, joining: list[_Row]) -> list[Completion]:
        num_running, running_cache, running_mask_BT = len(self._rows), self._cache, self._mask_BT
        self._rows = self._rows + joining
        width = max(len(row.request.prompt_ids) for row in joining)
        ids_BT = torch.zeros(len(joining), width, dtype=torch.long)
        mask_BT = torch.zeros_like(ids_BT)
        for row, ids_T, mask_T in zip(joining, ids_BT, mask_BT, strict=True):
            prompt = torch.as_tensor(row.request.prompt_ids)
            ids_T[-len(prompt) :] = prompt
            mask_T[-len(prompt) :] = 1
        ids_BT, mask_BT, cache = ids_BT.to(self._device), mask_BT.to(self._device), DynamicCache()
        logits_BV = self._forward(ids_BT, mask_BT, cache)
        if num_running:
            cache, mask_BT = _stack(running_cache, running_mask_BT, cache, mask_BT)
        self._cache, self._mask_BT = cache, mask_BT
        return self._accept(joining, logits_BV)

    @torch.inference_mode()
    def _decode(self) -> list[Completion]:
        ids_B1 = torch.tensor([row.token_ids[-1:] for row in self._rows], device=self._device)
        self._mask_BT = pad(self._mask_BT, (0, 1), value=1)
        return self._accept(self._rows, self._forward(ids_B1, self._mask_BT, self._cache))

    def _forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Logits [B, V] after the last of `ids_BT`; `mask_BT` covers the cached positions too."""
        positions_BT = (mask_BT.cumsum(dim=-1) - 1).clamp(min=0)[:, -ids_BT.shape[1] :]
        output = self.model(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            position_ids=positions_BT,
            past_key_values=cache,
            use_cache=True,
            **self._last_only,
        )
        return output.logits[:, -1]

    def _accept(self, rows: list[_Row], logits_BV: torch.Tensor) -> list[Completion]:
        """Sample and append a token to each of the rows, remove finished ones, and return their
        texts.
        """
        next_B = sample_tokens(
            logits_BV, [row.request for row in rows], [row.generator for row in rows]
        )
        ended: list[Completion] = []
        for row, token in zip(rows, next_B.tolist(), strict=True):
            row.token_ids.append(token)
            if finish := self._finish(row):
                self._ids.remove(row.request.id)
                ended.append(Completion(row.request.id, row.token_ids, finish))
        if ended:
            ended_ids = {completion.id for completion in ended}
            self._keep(
                [index for index, row in enumerate(self._rows) if row.request.id not in ended_ids]
            )
        return ended

    def _finish(self, row: _Row) -> Finish | None:
        last = row.token_ids[-1]
        if last in self._eos or last in row.request.stop_token_ids:
            return "stop"
        return "length" if len(row.token_ids) >= row.limit else None

    def _keep(self, indices: list[int]) -> None:
        """Remove all other rows, and left padding that no row needs."""
        if not indices:
            return self._clear()
        keep = torch.tensor(indices, device=self._device)
        mask_BT = self._mask_BT[keep]
        start = int(mask_BT.any(dim=0).long().argmax())
        self._rows = [self._rows[index] for index in indices]
        self._mask_BT = mask_BT[:, start:]
        for layer in self._cache.layers:
            rows = keep.to(layer.keys.device)
            layer.keys, layer.values = layer.keys[rows, :, start:], layer.values[rows, :, start:]
        return None


def _stack(
    above: DynamicCache,
    above_mask_BT: torch.Tensor,
    below: DynamicCache,
    below_mask_BT: torch.Tensor,
) -> tuple[DynamicCache, torch.Tensor]:
    """Concatenate two batches, both left-padded to the longer one's length."""
    width = max(above_mask_BT.shape[1], below_mask_BT.shape[1])
    above_by, below_by = width - above_mask_BT.shape[1], width - below_mask_BT.shape[1]
    for upper, lower in zip(above.layers, below.layers, strict=True):
        for name in ("keys", "values"):
            both = (
                pad(getattr(upper, name), (0, 0, above_by, 0)),
                pad(getattr(lower, name), (0, 0, below_by, 0)),
            )
            setattr(upper, name, torch.cat(both))
    return above, torch.cat([pad(above_mask_BT, (above_by, 0)), pad(below_mask_BT, (below_by, 0))])


def sample_tokens(
    logits_BV: torch.Tensor,
    requests: Sequence[Request],
    generators: Sequence[torch.Generator | None],
) -> torch.Tensor:
    """Token ids [B]: the argmax where a request's temperature is 0, otherwise a sample with the
    row's generator.

    A row's sample depends only on its logits and its generator, not on the batch. The argmax of p /
    e with e ~ Exp(1) is distributed as p.
    """
    next_B = logits_BV.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    if drawn:
        drawn_requests = [requests[row] for row in drawn]
        rows = torch.tensor(drawn, device=logits_BV.device)
        probabilities_BV = truncated_probabilities(logits_BV[rows].float(), drawn_requests)
        exponential_BV = torch.empty_like(probabilities_BV)
        for row, exponential_V in zip(drawn, exponential_BV, strict=True):
            exponential_V.exponential_(generator=generators[row])
        next_B[rows] = (probabilities_BV / exponential_BV).argmax(dim=-1)
    return next_B


def truncated_probabilities(logits_BV: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Softmax at each row's temperature, then truncated to its top_p nucleus (as in vLLM),
    unnormalised.
    """

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits_BV.device, dtype=logits_BV.dtype)[:, None]

    probabilities_BV = (logits_BV / column([request.temperature for request in requests])).softmax(
        dim=-1
    )
    if all(request.top_p >= 1 for request in requests):
        return probabilities_BV
    sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    nucleus_B1 = column([request.top_p for request in requests])
    sorted_BV = sorted_BV.masked_fill((before_BV >= nucleus_B1) & (before_BV > 0), 0.0)
    return torch.zeros_like(sorted_BV).scatter(-1, order_BV, sorted_BV)
