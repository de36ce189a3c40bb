"""Steps of fixed shapes, captured once and then replayed whole: on a GPU, as one CUDA graph.

Launching the thousand short kernels of a forward one by one takes the host longer than a GPU needs to compute them. So
everything that a step does on the device is one function of buffers that stay where they are: the texts' lengths are
numbers on the device, the cache hands out a width that its texts fill within a few hundred slots, and the mask hides
the rest. The host only reads what was accepted. One capture serves one batch size, width and rule.

Letters: B texts, N rows (the root and the nodes), T positions of a path, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.decoding.acceptance import AcceptanceRule
from pipeline.decoding.readout import Forward
from pipeline.decoding.steps import BatchState, TreeSteps

# Of a kind, before it is captured: the first one chooses kernels; and what is rare is not worth a capture.
WARM_UP_STEPS = 2
CAPTURED_LENGTH = 4096  # tokens that a text is given room for at once: a cache that grows makes captures void

log = logging.getLogger(__name__)

_Kind = tuple[int, int, AcceptanceRule]  # texts, width, rule


class GraphCapture(Protocol):
    """Runs what a step does on the device, and records it."""

    def run(self, function: Callable[[], None]) -> None:
        """Call it, as it will be called when it is captured."""
        ...

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Call it, and return what has the same effect again.

        RuntimeError when it does what cannot be captured; it then had no effect.
        """
        ...


class CudaGraphs:
    """CUDA graphs on one GPU. They share their scratch memory, as none runs while another does."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, _side_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, function: Callable[[], None]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),  # comes back even if the capture cannot end
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            function()  # launches nothing yet
        graph.replay()
        return graph.replay


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all decoders: each stream has a workspace of its own."""
    return torch.cuda.Stream(device)


def graph_capture_for(model: PreTrainedModel) -> GraphCapture | None:
    """CUDA graphs where the whole model lies on one GPU; elsewhere none."""
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    (device, *others) = devices
    return CudaGraphs(device) if device.type == "cuda" and not others else None


@dataclass
class _Buffers:
    """What a batch of some size reads and writes, at addresses that stay; noise only for rules that sample."""

    state: BatchState
    length_B: Tensor
    found: Tensor
    noise_BTV: Tensor | None = None


class CapturedSteps:
    """The steps of `TreeSteps`, captured; where the target does what cannot be captured, taken one by one."""

    def __init__(self, steps: TreeSteps, graph_capture: GraphCapture):
        self._steps, self._cache = steps, steps.cache
        self._graph_capture: GraphCapture = graph_capture
        self._can_capture = True
        self._buffers: dict[int, _Buffers] = {}
        self._taken: Counter[_Kind] = Counter()
        self._captured: dict[_Kind, Callable[[], None]] = {}
        self._allocation = 0

    @property
    def captures(self) -> bool:
        return self._can_capture

    def start(self, state: BatchState) -> None:
        if self._allocation != self._cache.allocation:  # the cache has moved
            self._allocation = self._cache.allocation
            self._captured.clear()
        size = len(state.token_B)
        if size not in self._buffers:
            num_found = self._steps.tree.max_depth + 3 if self._steps.tree.num_nodes else 1
            length_B, found = state.token_B.clone(), state.token_B.new_zeros(size, num_found)
            self._buffers[size] = _Buffers(BatchState(*(column.clone() for column in state)), length_B, found)
        buffers = self._buffers[size]
        for column, values in zip(buffers.state, state, strict=True):
            column.copy_(values)
        buffers.length_B.copy_(torch.tensor(self._cache.lengths))
        self._steps.start(buffers.state)

    def drop(self, kept: Sequence[int]) -> None:
        self._cache.drop(kept)
        self.start(BatchState(*(column[kept] for column in self._steps.state)))

    def take(self, forward: Forward, rule: AcceptanceRule, noise_BTV: Tensor | None) -> list[list[int]]:
        buffers = self._buffers[len(self._cache.lengths)]
        if noise_BTV is not None:
            buffers.noise_BTV = noise_BTV if buffers.noise_BTV is None else buffers.noise_BTV.copy_(noise_BTV)
        width = self._cache.width(self._steps.tree.num_nodes + 1)
        self._run((len(buffers.length_B), width, rule), lambda: self._step(buffers, width, forward, rule))
        rows, written = self._steps.read(buffers.found)
        self._cache.advance(rows)
        return written

    def _run(self, kind: _Kind, step: Callable[[], None]) -> None:
        self._taken[kind] += 1
        if kind in self._captured:
            self._captured[kind]()
        elif self._can_capture and self._taken[kind] > WARM_UP_STEPS:
            try:
                self._captured[kind] = self._graph_capture.capture(step)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                log.warning("The target's steps cannot be captured and run one by one: %s", _cause(error))
                self._can_capture = False
                step()
        else:
            self._graph_capture.run(step)

    def _step(self, buffers: _Buffers, width: int, forward: Forward, rule: AcceptanceRule) -> None:
        """All that a step does on the device."""
        steps, tree, length_B = self._steps, self._steps.tree, buffers.length_B
        positions_BN = (length_B[:, None] + tree.depth).clamp_(max=steps.max_length - 1)
        mask = steps.masks.within(length_B, width)
        noise_BTV = buffers.noise_BTV if rule.samples else None
        with self._cache.fixed(length_B, tree.num_nodes + 1, width):
            state, retrieve_BT, found = steps.verify(forward, positions_BN, mask, rule, noise_BTV)
            if tree.num_nodes:
                self._cache.move(retrieve_BT, 1)
        buffers.found.copy_(found)
        for column, values in zip(buffers.state, state, strict=True):
            column.copy_(values)
        length_B += tree.depth.index_select(0, found[:, 0]) + 1 if tree.num_nodes else 1


def _cause(error: BaseException) -> str:
    """What went wrong first, in a line: a capture that is broken off fails once more where it ends."""
    while error.__context__:
        error = error.__context__
    return str(error).split("\n")[0]
