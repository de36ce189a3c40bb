"""Features from any transformers causal LM: the backbone's last hidden states, in padded batches of
similar lengths.

Rows are right-padded and no mask is passed: under causal attention no token sees the padding to its
right, so a row's states do not depend on its batch and the fast causal kernel is used. The lm_head
does not run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pipeline.errors import EnvironmentFault
from pipeline.targets.loading import input_device, load_causal_lm, verify_tap
from pipeline.targets.spec import TargetSpec

# B batch, T positions (of the longest row), D hidden

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW_BATCHES = 16
WINDOW_BYTES = 2 * 1024**3  # of states; a window's first row may be computed last
GPU_MULTIPLE = (
    8  # a GPU's batches are this much longer at most: fewer shapes, and rows that start aligned
)


class TransformersFeatureEngine:
    """The FeatureEngine for everything that transformers loads, 4-bit and 8-bit targets included.

    Args:
        target: The spec to load and verify (`verify_tap`), or a loaded model, used as it is.
        tokens_per_batch: Maximum tokens of one forward, padding included. A longer row runs alone.
        gpus: GPUs that the target spans; 0 is the CPU. Only for loading.

    Raises:
        ConfigError, EnvironmentFault: As `load_causal_lm` and `verify_tap` do.
    """

    def __init__(
        self, target: TargetSpec | PreTrainedModel, *, tokens_per_batch: int = 16_384, gpus: int = 0
    ):
        if isinstance(target, TargetSpec):
            target = load_causal_lm(target, "cuda" if gpus else "cpu", max(gpus, 1))
            verify_tap(target)
        self.model: PreTrainedModel = target
        self.tokens_per_batch = tokens_per_batch
        self.hidden_size: int = target.config.get_text_config().hidden_size
        self.dtype: torch.dtype = target.dtype
        self._device = input_device(target)

    def stream(
        self, rows: Iterable[Sequence[int]]
    ) -> Generator[tuple[int, torch.Tensor], None, None]:
        """Each row's index and its states [T_i, D] on the host; the next batch runs while the
        caller works.

        Rows are taken in windows of sixteen batches' tokens, or `WINDOW_BYTES` of states where
        these are less, each sorted by length. A tensor is a view into its batch's buffer.

        Raises:
            EnvironmentFault: A single row does not fit into the GPU's memory.
        """
        pending: deque[_Batch] = deque()
        for indices, batch in self._batches(rows):
            pending.extend(self._launch(indices, batch))
            while len(pending) > 1:
                yield from pending.popleft().collect()
        for last in pending:
            yield from last.collect()

    def close(self) -> None:
        del self.model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _batches(
        self, rows: Iterable[Sequence[int]]
    ) -> Iterator[tuple[list[int], list[Sequence[int]]]]:
        most = WINDOW_BYTES // (self.hidden_size * self.dtype.itemsize)
        for window in _windows(
            rows, max(self.tokens_per_batch, min(WINDOW_BATCHES * self.tokens_per_batch, most))
        ):
            by_length = sorted(
                window, key=lambda item: -len(item[1])
            )  # longest first: fails early if at all
            while by_length:
                num_rows = max(1, self.tokens_per_batch // self._padded(len(by_length[0][1])))
                taken, by_length = by_length[:num_rows], by_length[num_rows:]
                yield [index for index, _ in taken], [ids for _, ids in taken]

    def _launch(self, indices: list[int], rows: list[Sequence[int]]) -> list[_Batch]:
        """Start one batch, split in halves where it exceeds the GPU's memory."""
        try:
            return [self._forward(indices, rows)]
        except torch.cuda.OutOfMemoryError as error:
            if len(rows) == 1:
                fix = (
                    "Shorten conversations (target.max_tokens), raise gpus_per_worker, or quantize"
                    " the target."
                )
                raise EnvironmentFault(
                    f"A row of {len(rows[0])} tokens exceeds the GPU.", "features", fix
                ) from error
        # Outside of the handler, because the traceback keeps the failed forward's activations
        # alive.
        self.tokens_per_batch = max(1, self.tokens_per_batch // 2)
        torch.cuda.empty_cache()
        half = (len(rows) + 1) // 2
        return self._launch(indices[:half], rows[:half]) + self._launch(indices[half:], rows[half:])

    def _padded(self, length: int) -> int:
        """The length of a batch whose longest row is this long."""
        if self._device.type == "cpu":
            return length
        context = (
            getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or length
        )
        return max(length, min(-(-length // GPU_MULTIPLE) * GPU_MULTIPLE, context))

    @torch.inference_mode()
    def _forward(self, indices: list[int], rows: list[Sequence[int]]) -> _Batch:
        lengths = [len(ids) for ids in rows]
        on_gpu = self._device.type == "cuda"
        # From pinned memory, as the host would else wait for the batch before to upload this one.
        ids_BT = torch.zeros(
            len(rows), self._padded(max(lengths)), dtype=torch.long, pin_memory=on_gpu
        )
        for row, ids in zip(ids_BT, rows, strict=True):
            row[: len(ids)] = torch.as_tensor(ids)
        ids_BT = ids_BT.to(self._device, non_blocking=True)
        hidden_BTD = self.model.base_model(input_ids=ids_BT, use_cache=False).last_hidden_state
        hidden_BTD = hidden_BTD.to(self.dtype)  # the dtype in the shard's footer
        if hidden_BTD.device.type != "cuda":
            return _Batch(indices, lengths, hidden_BTD, None)
        host_BTD = torch.empty(hidden_BTD.shape, dtype=hidden_BTD.dtype, pin_memory=True)
        host_BTD.copy_(hidden_BTD, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(hidden_BTD.device))
        return _Batch(indices, lengths, host_BTD, copied)


@dataclass(frozen=True)
class _Batch:
    """A running or finished forward; `copied` is set when the states are on the host."""

    indices: list[int]
    lengths: list[int]
    hidden_BTD: torch.Tensor
    copied: torch.cuda.Event | None

    def collect(self) -> Iterator[tuple[int, torch.Tensor]]:
        if self.copied is not None:
            self.copied.synchronize()
        for index, length, hidden_TD in zip(
            self.indices, self.lengths, self.hidden_BTD, strict=True
        ):
            yield index, hidden_TD[:length]


def _windows(
    rows: Iterable[Sequence[int]], num_tokens: int
) -> Iterator[list[tuple[int, Sequence[int]]]]:
    window: list[tuple[int, Sequence[int]]] = []
    held = 0
    for index, ids in enumerate(rows):
        if not len(ids):
            raise ValueError(f"row {index} is empty")
        if window and held + len(ids) > num_tokens:
            yield window
            window, held = [], 0
        window.append((index, ids))
        held += len(ids)
    if window:
        yield window
