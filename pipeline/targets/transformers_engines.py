"""Generation and feature engines that run any transformers causal LM.

Generation keeps one batch with a KV cache; rows join and leave it between steps. Rows are
left-padded. A step either prefills waiting requests and adds them to the batch, or decodes one
token for each row. There is no prefix cache: each turn prefills its whole history.

Features are the backbone's last hidden states, or outputs of its layers, in right-padded batches of
similar lengths. No mask is passed: under causal attention no token sees the padding to its right.
So, up to rounding, a row's states do not depend on its batch, and the fast causal kernel is used.
The lm_head does not run.

Letters: B batch, T positions, D hidden size, X states of a position, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from pipeline.conversations.requests import Completion, Finish, Request
from pipeline.errors import EnvironmentFault
from pipeline.targets.loading import input_device, layer_outputs, load_on_gpus, verify_tap
from pipeline.targets.spec import TargetSpec, context_length, eos_token_ids

MAX_BATCH_TOKENS = 65_536
WINDOW_BYTES = 2 * 1024**3  # of states, which a caller that needs rows in order may have to hold


@dataclass
class _Row:
    """A request in the generation batch, with the token ids generated so far, at most `limit`."""

    request: Request
    limit: int
    generator: torch.Generator | None
    token_ids: list[int] = field(default_factory=list)
    is_finished: bool = False


class TransformersGenerationEngine:
    """A generation engine that runs the target in transformers (see `GenerationEngine`).

    Args:
        spec: The target.
        max_batch_tokens: Maximum size of the KV cache in tokens (rows times the longest prompt and
            answer), unless a single row needs more.
        gpus: The number of GPUs over which the target is placed; 0 means the CPU.

    Raises:
        ConfigError, EnvironmentFault: The target cannot be loaded; see `load_causal_lm`.
    """

    def __init__(
        self, spec: TargetSpec, *, max_batch_tokens: int = MAX_BATCH_TOKENS, gpus: int = 0
    ):
        self.model = load_on_gpus(spec, gpus)
        self.max_batch_tokens = max_batch_tokens
        self._context = context_length(spec)
        # four times the rows that fit at full length, since few rows are that long
        self.capacity = 4 * max(1, max_batch_tokens // self._context)
        self._eos = frozenset(eos_token_ids(spec))
        self._device = input_device(self.model)
        self._last_only = {"logits_to_keep": 1} if self.model._supports_logits_to_keep() else {}
        self._waiting: deque[Request] = deque()
        self._clear_batch()

    def add(self, request: Request) -> None:
        """Queue a request; `step` adds it to the batch when there is room."""
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        """Prefill queued requests, or decode one token for each row; return the finished texts.

        Raises:
            EnvironmentFault: The batch does not fit into the GPU's memory.
        """
        try:
            joining = []
            if len(self._waiting) >= len(self._rows) // 4:  # joining copies the cache
                joining = self._admit()
            if joining:
                return self._prefill(joining)
            return self._decode()
        except torch.cuda.OutOfMemoryError as error:
            raise EnvironmentFault(
                f"A batch of {self.max_batch_tokens:,} tokens exceeds the GPU's memory.",
                "generate",
                "Lower max_batch_tokens in generate.engine_args or target.max_tokens, raise"
                " gpus_per_worker, or quantize the target.",
            ) from error

    def lengths(self) -> dict[str, int]:
        """Return the number of tokens so far of each row of the batch, by request id."""
        return {row.request.id: len(row.token_ids) for row in self._rows}

    def close(self) -> None:
        """Release the memory of the target and of its KV cache."""
        self._clear_batch()
        del self.model
        torch.cuda.empty_cache()

    def _clear_batch(self) -> None:
        """Make the batch empty: its rows, its KV cache and its attention mask."""
        self._rows: list[_Row] = []
        self._cache = DynamicCache()
        self._mask_BT = torch.ones(0, 0, dtype=torch.long, device=self._device)

    def _admit(self) -> list[_Row]:
        """Take requests that fit into the batch from the queue; at least one if the batch is empty.

        They are returned as rows, and are not in the batch yet.
        """
        width = self._mask_BT.shape[1]
        remaining = max((row.limit - len(row.token_ids) for row in self._rows), default=0)
        admitted: list[_Row] = []
        while self._waiting:
            request = self._waiting[0]
            limit = min(request.max_new_tokens, self._context - len(request.prompt_ids))
            width = max(width, len(request.prompt_ids))
            remaining = max(remaining, limit)
            num_rows = len(self._rows) + len(admitted) + 1
            if num_rows > 1 and num_rows * (width + remaining) > self.max_batch_tokens:
                break
            self._waiting.popleft()
            generator = None
            if request.seed is not None:
                generator = torch.Generator(self._device).manual_seed(request.seed)
            admitted.append(_Row(request, limit, generator))
        return admitted

    @torch.inference_mode()
    def _prefill(self, joining: list[_Row]) -> list[Completion]:
        """Prefill rows, add them to the batch, and sample a token each; return finished texts."""
        running = len(self._rows)
        self._rows = self._rows + joining
        prompts = [torch.tensor(row.request.prompt_ids) for row in joining]
        ids_BT = pad_sequence(prompts, batch_first=True, padding_side="left")
        is_prompt = [torch.ones_like(prompt_T) for prompt_T in prompts]
        mask_BT = pad_sequence(is_prompt, batch_first=True, padding_side="left")
        mask_BT = mask_BT.to(self._device)
        cache = DynamicCache()
        logits_BV = self._forward(ids_BT.to(self._device), mask_BT, cache)
        if running:
            self._append_cache(cache, mask_BT)
        else:
            self._cache, self._mask_BT = cache, mask_BT
        return self._add_sampled(joining, logits_BV)

    def _append_cache(self, cache: DynamicCache, mask_BT: torch.Tensor) -> None:
        """Append prefilled rows to the batch's KV cache and attention mask."""
        above, below = self._mask_BT[:, None, :, None], mask_BT[:, None, :, None]
        self._mask_BT = _stack_caches(above, below)[:, 0, :, 0]
        for layer, added in zip(self._cache.layers, cache.layers, strict=True):
            layer.keys = _stack_caches(layer.keys, added.keys)
            layer.values = _stack_caches(layer.values, added.values)

    @torch.inference_mode()
    def _decode(self) -> list[Completion]:
        """Decode one token for each row of the batch; return the finished texts."""
        ids_B1 = torch.tensor([row.token_ids[-1:] for row in self._rows], device=self._device)
        self._mask_BT = pad(self._mask_BT, (0, 1), value=1)
        logits_BV = self._forward(ids_B1, self._mask_BT, self._cache)
        return self._add_sampled(self._rows, logits_BV)

    def _forward(
        self, ids_BT: torch.Tensor, mask_BT: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        """Run the target on new ids; return the logits [B, V] at the last one.

        The ids are appended to `cache`. `mask_BT` covers the cached ids and the new ones.
        """
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

    def _add_sampled(self, rows: list[_Row], logits_BV: torch.Tensor) -> list[Completion]:
        """Sample a token for each row; remove finished rows from the batch, return their texts."""
        requests = [row.request for row in rows]
        next_B = sample_tokens(logits_BV, requests, [row.generator for row in rows])
        ended = []
        for row, token in zip(rows, next_B.tolist(), strict=True):
            row.token_ids.append(token)
            finish = self._finish_reason(row)
            if finish is not None:
                row.is_finished = True
                ended.append(Completion(row.request.id, row.token_ids, finish))
        if ended:
            self._remove_ended()
        return ended

    def _finish_reason(self, row: _Row) -> Finish | None:
        """Return "stop" or "length" if the row's last token ends its text, else None."""
        last = row.token_ids[-1]
        if last in self._eos or last in row.request.stop_token_ids:
            return "stop"
        return "length" if len(row.token_ids) >= row.limit else None

    def _remove_ended(self) -> None:
        """Remove finished rows from the batch, and then left padding that no row needs."""
        kept = [index for index, row in enumerate(self._rows) if not row.is_finished]
        if not kept:
            self._clear_batch()
            return
        self._rows = [self._rows[index] for index in kept]
        kept_B = torch.tensor(kept, device=self._device)
        mask_BT = self._mask_BT[kept_B]
        start = int(mask_BT.any(dim=0).long().argmax())
        self._mask_BT = mask_BT[:, start:]
        for layer in self._cache.layers:
            rows_B = kept_B.to(layer.keys.device)
            layer.keys = layer.keys[rows_B, :, start:]
            layer.values = layer.values[rows_B, :, start:]


def _stack_caches(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """Stack two KV caches [B, heads, T, size] along B; the shorter one is left-padded."""
    width = max(above.shape[2], below.shape[2])
    parts = [pad(part, (0, 0, width - part.shape[2], 0)) for part in (above, below)]
    return torch.cat(parts)


def sample_tokens(
    logits_BV: torch.Tensor,
    requests: Sequence[Request],
    generators: Sequence[torch.Generator | None],
) -> torch.Tensor:
    """Sample a token id for each row [B]; at temperature 0 it is the argmax.

    The argmax of p / e with e ~ Exp(1) is distributed as p.

    Args:
        requests: The request of each row, with temperature and top_p.
        generators: The random generator of each row, which makes its sample independent of the
            other rows. None is torch's global generator.
    """
    next_B = logits_BV.argmax(dim=-1)
    drawn = [row for row, request in enumerate(requests) if request.temperature > 0]
    if drawn:
        rows_B = torch.tensor(drawn, device=logits_BV.device)
        drawn_requests = [requests[row] for row in drawn]
        probabilities_BV = truncated_probabilities(logits_BV[rows_B].float(), drawn_requests)
        exponential_BV = torch.empty_like(probabilities_BV)
        for row, exponential_V in zip(drawn, exponential_BV, strict=True):
            exponential_V.exponential_(generator=generators[row])
        next_B[rows_B] = (probabilities_BV / exponential_BV).argmax(dim=-1)
    return next_B


def truncated_probabilities(logits_BV: torch.Tensor, requests: Sequence[Request]) -> torch.Tensor:
    """Return the probabilities [B, V] after temperature and then top-p, as in vLLM.

    They are not normalised again after top-p has set some to zero. Temperatures must be positive.
    """
    temperature_B1 = logits_BV.new_tensor([[request.temperature] for request in requests])
    top_p_B1 = logits_BV.new_tensor([[request.top_p] for request in requests])
    probabilities_BV = (logits_BV / temperature_B1).softmax(dim=-1)
    if all(request.top_p >= 1 for request in requests):
        return probabilities_BV
    sorted_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    sorted_BV = sorted_BV.masked_fill((before_BV >= top_p_B1) & (before_BV > 0), 0.0)
    return torch.zeros_like(sorted_BV).scatter(-1, order_BV, sorted_BV)


class TransformersFeatureEngine:
    """A feature engine that runs the target in transformers (see `FeatureEngine`).

    Args:
        spec: The target.
        tokens_per_batch: Maximum tokens of one forward pass, including padding up to the longest
            row. A longer row runs alone.
        layers: The layers whose outputs to compute, ascending; empty for the last states.
        gpus: The number of GPUs over which the target is placed; 0 means the CPU.

    Raises:
        ConfigError, EnvironmentFault: The target cannot be loaded, or its hidden states are not the
            inputs of its lm_head; see `load_causal_lm` and `verify_tap`.
    """

    def __init__(
        self,
        spec: TargetSpec,
        *,
        tokens_per_batch: int = 16_384,
        layers: Sequence[int] = (),
        gpus: int = 0,
    ):
        self.model = load_on_gpus(spec, gpus)
        verify_tap(self.model)
        self.tokens_per_batch, self.layers = tokens_per_batch, layers
        self.hidden_size: int = self.model.config.get_text_config().hidden_size
        self.dtype: torch.dtype = self.model.dtype
        self._device = input_device(self.model)

    def stream(
        self, rows: Iterable[Sequence[int]]
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Yield the index and the states [T_i, X] of each row of token ids, on the CPU.

        On a GPU, the next batch runs while the caller works. Rows are read in windows of
        `WINDOW_BYTES` of states. Within a window, longer rows come first. A tensor is a view of
        its batch's buffer.

        Raises:
            EnvironmentFault: A batch does not fit into the GPU's memory.
        """
        pending: deque[_FeatureBatch] = deque()
        for indices, batch in self._feature_batches(rows):
            try:
                pending.append(self._forward(indices, batch))
            except torch.cuda.OutOfMemoryError as error:
                raise EnvironmentFault(
                    f"{len(batch)} rows of {len(batch[0])} tokens exceed the GPU's memory.",
                    "features",
                    "Lower features.tokens_per_batch or target.max_tokens, raise gpus_per_worker,"
                    " or quantize the target.",
                ) from error
            if len(pending) > 1 or self._device.type == "cpu":
                yield from pending.popleft().collect()
        for last in pending:
            yield from last.collect()

    def close(self) -> None:
        """Release the memory of the target."""
        del self.model
        torch.cuda.empty_cache()

    def _feature_batches(
        self, rows: Iterable[Sequence[int]]
    ) -> Iterator[tuple[list[int], list[Sequence[int]]]]:
        """Yield batches of rows of similar lengths: the indices and the token ids of the rows."""
        row_size = self.hidden_size * max(1, len(self.layers))
        num_tokens = WINDOW_BYTES // (row_size * self.dtype.itemsize)
        for window in _row_windows(rows, num_tokens):
            # longest first: memory runs out early if at all
            window.sort(key=lambda item: len(item[1]), reverse=True)
            while window:
                num_rows = max(1, self.tokens_per_batch // len(window[0][1]))
                batch, window = window[:num_rows], window[num_rows:]
                yield [index for index, _ in batch], [ids for _, ids in batch]

    @torch.inference_mode()
    def _forward(self, indices: list[int], rows: list[Sequence[int]]) -> _FeatureBatch:
        """Run the target on a batch of rows, and start the copy of the states to the CPU.

        On a GPU, the function returns before either is finished.
        """
        lengths = [len(ids) for ids in rows]
        on_gpu = self._device.type == "cuda"
        # Pinned: otherwise this upload would make the host wait for the previous batch.
        ids_BT = torch.zeros(len(rows), max(lengths), dtype=torch.long, pin_memory=on_gpu)
        for row_T, ids in zip(ids_BT, rows, strict=True):
            row_T[: len(ids)] = torch.as_tensor(ids)
        ids_BT = ids_BT.to(self._device, non_blocking=True)
        hidden_BTX = self._states(ids_BT).to(self.dtype)  # the dtype in the shard's footer
        host_BTX = hidden_BTX.to("cpu", non_blocking=True)  # from a GPU into pinned memory
        copied = None
        if on_gpu:
            copied = torch.cuda.Event()
            copied.record(torch.cuda.current_stream(hidden_BTX.device))
        return _FeatureBatch(indices, lengths, host_BTX, copied)

    def _states(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Return the states [B, T, X] of a batch: the outputs of `layers`, or the last states."""
        if not self.layers:
            return self.model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        with layer_outputs(self.model, self.layers) as seen:
            self.model.base_model(input_ids=ids_BT, use_cache=False)
        return seen[0]


@dataclass(frozen=True)
class _FeatureBatch:
    """The states of a right-padded batch of rows, on the CPU or on their way to it.

    `copied` is the CUDA event that marks the end of the copy from a GPU, or None on a CPU.
    """

    indices: list[int]
    lengths: list[int]
    hidden_BTX: torch.Tensor
    copied: torch.cuda.Event | None

    def collect(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Wait for the states, and yield the index and the states [T_i, X] of each row."""
        if self.copied is not None:
            self.copied.synchronize()
        states = zip(self.indices, self.lengths, self.hidden_BTX, strict=True)
        for index, length, hidden_TX in states:
            yield index, hidden_TX[:length]


def _row_windows(
    rows: Iterable[Sequence[int]], num_tokens: int
) -> Iterator[list[tuple[int, Sequence[int]]]]:
    """Group consecutive rows into windows of at most `num_tokens` tokens.

    A longer row is a window of its own. A window lists the index and the token ids of each row.
    """
    window: list[tuple[int, Sequence[int]]] = []
    held = 0
    for index, ids in enumerate(rows):
        if window and held + len(ids) > num_tokens:
            yield window
            window, held = [], 0
        window.append((index, ids))
        held += len(ids)
    if window:
        yield window
