"""Captured steps write the same text as uncaptured steps."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.decoding import cuda_graphs
from pipeline.decoding.decoder import Decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.conftest import CONTEXT, FAMILIES, PROMPT, PROMPTS, SPARSE, endless, seeded
from tests.decoding.test_acceptance import RULES

TREES = {
    "plain": (),
    "sparse": SPARSE,
    "cartesian": cartesian_tree((3, 2)),
    "dynamic": DynamicTree(9, 3, 3),
}


class Tape(TorchDispatchMode):
    """Records operators as a CUDA graph does; reading a tensor is refused."""

    def __init__(self):
        super().__init__()
        self.operators: list[tuple] = []
        self.replayed = self.rehearsed = 0

    def run(self, function: Callable[[], None]) -> None:
        function()

    def rehearse(self, function: Callable[[], None]) -> None:
        self.rehearsed += 1
        self.operators = []
        with self:
            function()

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        self.operators = operators = []
        with self:
            function()
        return lambda: self._replay(operators)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.overloadpacket in (torch.ops.aten.item, torch.ops.aten._local_scalar_dense):
            raise RuntimeError("operation not permitted when stream is capturing")
        made = operator(*args, **(kwargs or {}))
        self.operators.append((operator, args, kwargs or {}, made))
        return made

    def _replay(self, operators: list[tuple]) -> None:
        self.replayed += 1
        again: dict[int, torch.Tensor] = {}
        for operator, args, kwargs, made in operators:
            renewed = {name: _renewed(one, again) for name, one in kwargs.items()}
            result = operator(*_renewed(args, again), **renewed)
            for old, new in zip(_tensors(made), _tensors(result), strict=True):
                again[id(old)] = new


def _renewed(value, again: dict[int, torch.Tensor]):
    """Replace the tensors of an argument by those of this replay."""
    if isinstance(value, torch.Tensor):
        return again.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(_renewed(one, again) for one in value)
    return value


def _tensors(made) -> list[torch.Tensor]:
    listed = made if isinstance(made, tuple | list) else [made]
    return [one for one in listed if isinstance(one, torch.Tensor)]


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Use cache widths of 16 slots, so that texts outgrow several."""
    monkeypatch.setattr("pipeline.decoding.cache._GRANULE", 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_step_writes_what_transformers_writes(family, pair, continuation):
    model, heads = pair(family)
    expected = continuation(model, PROMPT, 36)
    for tree in (SPARSE, ()):
        tape = Tape()
        decoder = endless(model, heads, tree, graph_capture=tape)
        first, again = decoder.generate(PROMPT, 36), decoder.generate(PROMPT, 36)
        assert first.token_ids == again.token_ids == expected
        assert tape.replayed > again.num_steps > 10, "the second text needs no new captures"


def test_captured_text_ends_at_the_context_of_a_position_table(pair, continuation):
    model, heads = pair("gpt2-positions")
    prompt, room = PROMPT * 11, CONTEXT - 11 * len(PROMPT)
    decoder = endless(model, heads, SPARSE, graph_capture=Tape())
    assert decoder.generate(prompt, 30).token_ids == continuation(model, prompt, room)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tree", TREES)
def test_every_rule_and_a_batch_that_shrinks(rule, tree, pair):
    tape, found = Tape(), []
    for capture, times in ((None, 1), (tape, 2)):
        decoder = Decoder(
            *pair("mistral-window"), TREES[tree], eos_token_ids=(7,), graph_capture=capture
        )
        for _ in range(times):
            decoded = decoder.generate_batch(PROMPTS, 30, rule, list(map(seeded, range(5))))
            found.append([(one.token_ids, one.accepted) for one in decoded])
    assert all(one == found[0] for one in found) and tape.replayed > 10


def test_a_reallocated_cache_invalidates_captures(pair, continuation):
    model, heads = pair("llama")
    tape = Tape()
    decoder = endless(model, heads, SPARSE, graph_capture=tape)
    for number in (1, 1, 3, 1):
        tape.rehearsed = 0
        expected = [continuation(model, prompt, 12) for prompt in PROMPTS[:number]]
        found = decoder.generate_batch(PROMPTS[:number], 12)
        assert [one.token_ids for one in found] == expected
    assert tape.replayed and tape.rehearsed, "steps on a new cache are warmed up anew"


def test_a_deleted_decoder_frees_its_memory_at_once(pair):
    decoder = endless(*pair("llama"), SPARSE, graph_capture=Tape())
    decoder.generate(PROMPT, 12)
    cache = weakref.ref(decoder._cache)
    gc.disable()
    try:
        del decoder
        assert cache() is None
    finally:
        gc.enable()


def test_a_target_that_cannot_be_captured_is_decoded_anyway(
    pair, continuation, caplog, monkeypatch
):
    model, heads = pair("llama")
    tape = Tape()
    decoder = endless(model, heads, SPARSE, graph_capture=tape)
    never = lambda step: pytest.fail("a capture that fails breaks the allocator")  # noqa: E731
    monkeypatch.setattr(tape, "capture", never)
    monkeypatch.setattr(tape, "rehearse", lambda step: Tape.capture(tape, step))
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda _, inputs: inputs[0].sum().item() and None
    )
    with caplog.at_level(logging.WARNING, cuda_graphs.__name__):
        for _ in range(2):
            assert decoder.generate(PROMPT, 30).token_ids == continuation(model, PROMPT, 30)
    hook.remove()
    assert not tape.replayed and len(caplog.records) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_graphs_write_what_transformers_writes(family, tree, pair, continuation, caplog):
    """The batch shrinks."""
    model, heads = pair(family)
    expected = [continuation(model, prompt, 40, (7,)) for prompt in PROMPTS]
    model, heads = copy.deepcopy(model).cuda(), copy.deepcopy(heads).cuda()
    decoder = Decoder(model, heads, TREES[tree], eos_token_ids=(7,))
    for _ in range(3):
        found = decoder.generate_batch(PROMPTS, 40)
        assert [one.token_ids for one in found] == expected
    assert decoder.captures and not caplog.records
