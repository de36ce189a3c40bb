"""Captured steps write what uncaptured steps do: nothing that changes between steps may be left on
the host.
"""

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
from pipeline.decoding.cuda_graphs import graph_capture_for
from pipeline.decoding.decoder import Decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.tree import cartesian_tree
from tests.decoding.conftest import CONTEXT
from tests.decoding.test_acceptance import RULES
from tests.decoding.test_batches import PROMPTS, seeded
from tests.decoding.test_decoder import FAMILIES, PROMPT, SPARSE


class Tape(TorchDispatchMode):
    """Records operators as a CUDA graph does: tensors by where they are, all else as it was;
    reading one is refused.
    """

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
            result = operator(
                *_renewed(args, again),
                **{name: _renewed(one, again) for name, one in kwargs.items()},
            )
            for old, new in zip(_tensors(made), _tensors(result), strict=True):
                again[id(old)] = new


def _renewed(value, again: dict[int, torch.Tensor]):
    """An argument with the tensors that this replay has made; torch's own `tree_map` takes half of
    a replay's time.
    """
    if isinstance(value, torch.Tensor):
        return again.get(id(value), value)
    return (
        type(value)(_renewed(one, again) for one in value)
        if type(value) in (tuple, list)
        else value
    )


def _tensors(made) -> list[torch.Tensor]:
    return [
        one
        for one in (made if isinstance(made, tuple | list) else [made])
        if isinstance(one, torch.Tensor)
    ]


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    """Widths of 16 slots, so that texts outgrow several."""
    monkeypatch.setattr("pipeline.decoding.cache._GRANULE", 16)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_captured_step_replayed_writes_what_transformers_writes(family, pair, continuation):
    model, heads = pair(family)
    expected = continuation(model, PROMPT, 36)
    for tree in (SPARSE, ()):
        tape = Tape()
        decoder = Decoder(model, heads, tree, eos_token_ids=(), graph_capture=tape)
        first, again = decoder.generate(PROMPT, 36), decoder.generate(PROMPT, 36)
        assert first.token_ids == again.token_ids == expected
        assert tape.replayed > again.num_steps > 10, (
            "what the first text has captured must serve the second"
        )


def test_captured_text_ends_with_the_context_of_a_position_table(pair, continuation):
    model, heads = pair("gpt2-positions")
    prompt, room = PROMPT * 11, CONTEXT - 11 * len(PROMPT)
    decoder = Decoder(model, heads, SPARSE, eos_token_ids=(), graph_capture=Tape())
    assert decoder.generate(prompt, 30).token_ids == continuation(model, prompt, room)


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "tree",
    [(), SPARSE, cartesian_tree((3, 2)), DynamicTree(9, 3, 3)],
    ids=["plain", "sparse", "cartesian", "dynamic"],
)
def test_every_rule_and_a_batch_that_shrinks(rule, tree, pair):
    model, heads = pair("mistral-window")
    expected = Decoder(model, heads, tree, eos_token_ids=(7,)).generate_batch(
        PROMPTS, 30, rule, seeded(5)
    )
    tape = Tape()
    decoder = Decoder(model, heads, tree, eos_token_ids=(7,), graph_capture=tape)
    for _ in range(2):
        found = decoder.generate_batch(PROMPTS, 30, rule, seeded(5))
        assert [(one.token_ids, one.accepted) for one in found] == [
            (one.token_ids, one.accepted) for one in expected
        ]
    assert tape.replayed > 10


def test_a_cache_that_moves_makes_captures_void(pair, continuation):
    model, heads = pair("llama")
    tape = Tape()
    decoder = Decoder(model, heads, SPARSE, eos_token_ids=(), graph_capture=tape)
    for number in (1, 1, 3, 1):
        tape.rehearsed = 0
        found = decoder.generate_batch(PROMPTS[:number], 12)
        assert [one.token_ids for one in found] == [
            continuation(model, prompt, 12) for prompt in PROMPTS[:number]
        ]
    assert tape.replayed and tape.rehearsed, "steps on a new cache are warmed up anew"


@pytest.mark.slow
def test_after_one_pass_nothing_is_captured_any_more(pair, monkeypatch):
    model, heads = pair("llama")
    tape = Tape()
    decoder = Decoder(model, heads, SPARSE, eos_token_ids=(), graph_capture=tape)
    for prompt in PROMPTS:
        decoder.generate(prompt, 40)
    monkeypatch.setattr(tape, "capture", lambda step: pytest.fail("a timed pass would wait for it"))
    for prompt in PROMPTS:
        decoder.generate(prompt, 40)


def test_a_decoder_that_is_done_with_gives_its_memory_back_at_once(pair):
    decoder = Decoder(*pair("llama"), SPARSE, eos_token_ids=(), graph_capture=Tape())
    decoder.generate(PROMPT, 12)
    cache = weakref.ref(decoder._cache)
    gc.disable()
    try:
        del decoder
        assert cache() is None
    finally:
        gc.enable()


def test_a_target_that_reads_its_numbers_back_is_decoded_step_by_step(
    pair, continuation, caplog, monkeypatch
):
    model, heads = pair("llama")
    tape = Tape()
    decoder = Decoder(model, heads, SPARSE, eos_token_ids=(), graph_capture=tape)
    monkeypatch.setattr(
        tape, "capture", lambda step: pytest.fail("a capture that fails breaks the allocator")
    )
    monkeypatch.setattr(tape, "rehearse", lambda step: Tape.capture(tape, step))
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda _, inputs: inputs[0].sum().item() and None
    )
    with caplog.at_level(logging.WARNING, cuda_graphs.__name__):
        for _ in range(2):
            assert decoder.generate(PROMPT, 30).token_ids == continuation(model, PROMPT, 30)
    hook.remove()
    assert not tape.replayed
    assert [record.message for record in caplog.records] == [
        "The target's steps cannot be captured and run one by one: operation not permitted when"
        " stream is capturing"
    ]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("family", FAMILIES)
def test_cuda_graphs_write_what_transformers_writes(family, pair, continuation, caplog):
    model, heads = pair(family)
    expected = continuation(model, PROMPT, 60)
    model, heads = copy.deepcopy(model).cuda(), copy.deepcopy(heads).cuda()
    for tree in (SPARSE, ()):
        decoder = Decoder(
            model, heads, tree, eos_token_ids=(), graph_capture=graph_capture_for(model)
        )
        assert (
            decoder.generate(PROMPT, 60).token_ids
            == decoder.generate(PROMPT, 60).token_ids
            == expected
        )
        assert decoder.captures and not caplog.records, (
            "a step that cannot be captured would run uncaptured"
        )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("rule", RULES)
def test_cuda_graphs_in_a_batch_that_shrinks(rule, pair):
    model, heads = (copy.deepcopy(one).cuda() for one in pair("mistral-window"))
    noise = lambda: [torch.Generator("cuda").manual_seed(n) for n in range(len(PROMPTS))]  # noqa: E731
    expected = Decoder(model, heads, SPARSE, eos_token_ids=(7,)).generate_batch(
        PROMPTS, 30, rule, noise()
    )
    decoder = Decoder(
        model, heads, SPARSE, eos_token_ids=(7,), graph_capture=graph_capture_for(model)
    )
    for _ in range(2):
        found = decoder.generate_batch(PROMPTS, 30, rule, noise())
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert decoder.captures


def test_nothing_is_captured_on_a_cpu(pair):
    assert graph_capture_for(pair("llama")[0]) is None
