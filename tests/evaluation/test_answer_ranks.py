"""Heads on plain answers: a replay accepts what decoding accepts."""

from __future__ import annotations

import copy

import pytest

from pipeline.decoding.decoder import Decoder, acceleration_rate, plain_decoder
from pipeline.decoding.held_out import replay
from pipeline.decoding.tree import cartesian_tree, stock_tree
from pipeline.evaluation.answer_ranks import answer_ranks
from pipeline.evaluation.prompts import held_out_prompts
from pipeline.export.directory import read_heads
from tests.flows.tiny import token_rows


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 3, 24])
@pytest.mark.parametrize("eos", [(), tuple(range(300))[::7]], ids=["cut", "ended"])
def test_a_replay_of_plain_text_finds_the_rate_of_decoding(model, finished_run, num_tokens, eos):
    """The rates agree for every tree, cuts and ends included."""
    model = copy.deepcopy(model).double()  # no near-tie blurs the comparison
    heads = read_heads(finished_run.path / "latest/export", model).double()
    asked = held_out_prompts(token_rows(finished_run.latest("generate")), 8, 100).kept
    plain = plain_decoder(model, eos_token_ids=eos)
    texts = [plain.generate(prompt.ids, num_tokens).token_ids for prompt in asked]
    ranks = answer_ranks(model, heads, asked, texts, 10)
    for choices in (stock_tree(3), cartesian_tree([1, 1, 1]), [(0,), (3,), (0, 1)]):
        decoder = Decoder(model, heads, choices, eos_token_ids=eos)
        decoded = [decoder.generate(prompt.ids, num_tokens) for prompt in asked]
        assert [one.token_ids for one in decoded] == texts
        expected = pytest.approx(acceleration_rate(decoded), nan_ok=True)
        assert replay(ranks, choices).acceleration_rate == expected
