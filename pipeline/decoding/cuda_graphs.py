"""Capture decoding steps as CUDA graphs and replay them.

Launching the many short kernels of a forward pass takes the host longer than running them takes the
GPU. A captured step is one function of buffers with fixed addresses and shapes: lengths are read on
the device, the KV cache returns a number of slots ("width") that is rounded up to a multiple of
256, and the mask hides unused slots. The host reads only the accepted tokens. One graph serves one
batch size, width and acceptance rule.

Letters: B texts, N rows (the root and the nodes), T positions of a path, D hidden size, V
vocabulary.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.steps import BatchState, Forward, TreeSteps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Steps of each kind before its capture: the first one selects kernels, the last one is the
# rehearsal. So rare kinds are not captured.
WARM_UP_STEPS = 2
# Tokens of cache allocated per text from the start, because reallocation invalidates graphs.
CAPTURED_LENGTH = 4096

log = logging.getLogger(__name__)

_Kind = tuple[int, int, AcceptanceRule]  # texts, width, rule


class CudaGraphs:
    """Capture of decoding steps as CUDA graphs on one GPU.

    All graphs share one memory pool, because no two graphs run concurrently.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = _side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], None]) -> None:
        """Run a decoding step without capture, on the stream that is used for captures."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                function()
        finally:
            current.wait_stream(self._stream)

    def rehearse(self, function: Callable[[], None]) -> None:
        """Run a decoding step without capture; raise RuntimeError if it synchronizes with the GPU.

        Such a step cannot be captured, and a capture that fails half-way may leave the allocator's
        memory pool unusable (torch 2.13: pull request 190308).
        """
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            self.run(function)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Capture a decoding step as a CUDA graph, replay it once, and return its replay function.

        Raises RuntimeError if the step cannot be captured; the step has then had no effect.
        """
        graph = torch.cuda.CUDAGraph()
        capturing = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        # The outer context restores the stream even if the capture fails.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)), capturing:
            function()  # captured, not run
        graph.replay()
        return graph.replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the CUDA stream for captures on a device.

    All decoders share it, because torch keeps a cuBLAS workspace for every stream.
    """
    return torch.cuda.Stream(device)


def graph_capture_for(model: PreTrainedModel) -> CudaGraphs | None:
    """Return CUDA graph capture for decoding with a model on one GPU, otherwise None."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        return None
    (device,) = devices
    return CudaGraphs(device) if device.type == "cuda" else None


@dataclass
class _Buffers:
    """Inputs and outputs of captured steps of one batch size, at fixed addresses.

    `found` is the result of `TreeSteps.accept_paths`. `noise_BTV` is None until a rule samples.
    """

    state: BatchState
    length_B: Tensor
    found: Tensor
    noise_BTV: Tensor | None = None

    def set_state(self, state: BatchState) -> None:
        """Copy a batch's decoding state into the buffers."""
        for column, values in zip(self.state, state, strict=True):
            column.copy_(values)


class CapturedSteps:
    """Decoding steps of `TreeSteps` as CUDA graphs; without graphs if a step cannot be captured."""

    def __init__(self, steps: TreeSteps, graph_capture: CudaGraphs):
        self.captures = True
        self._steps = steps
        self._cache = steps.cache
        self._graph_capture = graph_capture
        self._buffers: dict[int, _Buffers] = {}
        self._num_steps: Counter[_Kind] = Counter()
        self._captured: dict[_Kind, Callable[[], None]] = {}
        self._allocation = 0

    def begin_decoding(self, state: BatchState) -> None:
        """Copy a batch's decoding state and cached lengths into the buffers of its size.

        If the KV cache was reallocated, all captured graphs are dropped.
        """
        if self._allocation != self._cache.allocation:  # the cache was reallocated
            self._allocation = self._cache.allocation
            self._captured.clear()
            self._num_steps.clear()
        size = len(state.token_B)
        if size not in self._buffers:
            own = BatchState(state.hidden_BD.clone(), state.token_B.clone())
            num_found = self._steps.tree.max_depth + 3  # depth, root, path, next token
            found = state.token_B.new_zeros(size, num_found)
            self._buffers[size] = _Buffers(own, state.token_B.clone(), found)
        buffers = self._buffers[size]
        buffers.set_state(state)
        buffers.length_B.copy_(torch.tensor(self._cache.lengths))
        self._steps.begin_decoding(buffers.state)

    def drop_texts(self, kept: Sequence[int]) -> None:
        """Drop finished texts from the decoded batch; keep the ascending indices `kept`."""
        self._steps.drop_texts(kept)
        self.begin_decoding(self._steps.state)

    def decode_step(
        self, forward: Forward, rule: AcceptanceRule, noise_BTV: Tensor | None
    ) -> list[list[int]]:
        """Take one decoding step; return the tokens that it adds to each text.

        `noise_BTV` is the sampling noise, or None for a rule that does not sample.
        """
        buffers = self._buffers[len(self._cache.lengths)]
        if buffers.noise_BTV is None:
            buffers.noise_BTV = noise_BTV
        elif noise_BTV is not None:
            buffers.noise_BTV.copy_(noise_BTV)
        width = self._cache.fixed_width(self._steps.tree.num_nodes + 1)
        kind = (len(buffers.length_B), width, rule)
        self._run(kind, lambda: self._step(buffers, width, forward, rule))
        return self._steps.read_tokens(buffers.found)

    def _run(self, kind: _Kind, step: Callable[[], None]) -> None:
        """Run a decoding step: replay its graph, or capture one after `WARM_UP_STEPS` such steps.

        If a step cannot be captured, it and all later steps without a graph run uncaptured.
        """
        self._num_steps[kind] += 1
        if kind in self._captured:
            self._captured[kind]()
            return
        if not self.captures or self._num_steps[kind] < WARM_UP_STEPS:
            self._graph_capture.run(step)
            return
        try:
            if self._num_steps[kind] == WARM_UP_STEPS:
                self._graph_capture.rehearse(step)
            else:
                self._captured[kind] = self._graph_capture.capture(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            log.warning("CUDA graph capture failed; steps run without graphs: %s", error)
            self.captures = False
            step()

    def _step(self, buffers: _Buffers, width: int, forward: Forward, rule: AcceptanceRule) -> None:
        """Run the part of a decoding step that is captured: propose, verify and accept.

        Inputs are read from the buffers, and results are written to them.
        """
        steps = self._steps
        length_B = buffers.length_B
        tree, tokens_BN = steps.propose_trees()
        positions_BN = (length_B[:, None] + tree.depth).clamp_(max=steps.max_length - 1)
        mask = steps.masks.masks_after(length_B, width, tree)
        noise_BTV = buffers.noise_BTV if rule.samples else None
        with self._cache.fixed_lengths(length_B, steps.tree.num_nodes + 1, width):
            read = forward(tokens_BN, positions_BN, mask, self._cache)
            state, found = steps.accept_paths(*read, tokens_BN, tree, rule, noise_BTV)
        buffers.found.copy_(found)
        buffers.set_state(state)
        length_B += found[:, 0] + 1
