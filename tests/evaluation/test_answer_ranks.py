"""Heads on plain answers: a replay accepts what decoding accepts."""

from __future__ import annotations

import copy

import pytest
import torch

from pipeline.decoding.decoder import Decoder, acceleration_rate, plain_decoder
from pipeline.decoding.held_out import replay
from pipeline.decoding.tree import cartesian_tree, stock_tree
from pipeline.evaluation.answer_ranks import answer_ranks
from pipeline.evaluation.prompts import held_out_prompts
from pipeline.export.directory import read_heads
from pipeline.heads.eagle3 import Eagle3Heads
from pipeline.heads.kind import Heads, TargetWeights
from pipeline.heads.shapes import Eagle3Shape
from tests.flows.tiny import token_rows


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 3, 24])
@pytest.mark.parametrize("eos", [(), tuple(range(300))[::7]], ids=["cut", "ended"])
def test_a_replay_of_plain_text_finds_the_rate_of_decoding(model, finished_run, num_tokens, eos):
    """The rates agree for every tree, cuts and ends included."""
    model = copy.deepcopy(model).double()  # no near-tie blurs the comparison
    heads = read_heads(finished_run.path / "latest/export", model).double()
    replay_as_decoded(model, heads, finished_run, num_tokens, eos)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [3, 24])
def test_heads_that_read_rows_replay_as_they_decode(model, finished_run, num_tokens):
    model = copy.deepcopy(model).double()
    config = model.config
    heads = Eagle3Heads.initial(
        Eagle3Shape(config.hidden_size, config.vocab_size, 3, layers=(1, config.num_hidden_layers)),
        TargetWeights(lambda: model.lm_head.weight, lambda: model.get_input_embeddings().weight),
    )
    for parameter in (heads.o, heads.down):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(0))
    replay_as_decoded(model, heads, finished_run, num_tokens)


def replay_as_decoded(model, heads: Heads, finished_run, num_tokens: int, eos=()) -> None:
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
