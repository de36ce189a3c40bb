"""The studies' rows: each row's decoding, and relations that hold on any machine."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from pipeline.artifacts.check_result import CheckFigures, GreedyMatch, NativeFigures, Studies
from pipeline.artifacts.tree_file import Calibration, read_calibration
from pipeline.decoding.decoder import Decoder, acceleration_rate, plain_decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import replay
from pipeline.decoding.tree import cartesian_tree, stock_tree
from pipeline.evaluation.answer_states import answer_states, guess_ranks
from pipeline.evaluation.prompts import Prompt, held_out_prompts
from pipeline.evaluation.studies import Decoding, tree_ladder
from pipeline.export.directory import read_heads
from pipeline.report.documents import report_texts
from pipeline.report.report import Extras, Report
from tests.flows.tiny import token_rows

TREE = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]


@pytest.fixture(scope="module")
def calibration(finished_run) -> Calibration:
    return read_calibration(finished_run.path / "latest/calibrate")


@pytest.fixture(scope="module")
def exact(model, finished_run):
    """The target and its heads in float64, where no near-tie blurs a comparison."""
    model = copy.deepcopy(model).double()
    return model, read_heads(finished_run.path / "latest/export", model).double()


@pytest.fixture(scope="module")
def prompts(finished_run) -> list[Prompt]:
    return held_out_prompts(token_rows(finished_run.latest("generate")), 3, 100).kept


@pytest.fixture(scope="module")
def decoding(model, finished_run, prompts) -> Decoding:
    heads = read_heads(finished_run.path / "latest/export", model)
    plain = plain_decoder(model, eos_token_ids=(1,))
    medusa = Decoder(model, heads, TREE, eos_token_ids=(1,))
    texts = [plain.generate(prompt.ids, 10).token_ids for prompt in prompts]
    return Decoding(plain, medusa, prompts, texts)


def test_the_ladder_ends_with_the_export_s_tree(decoding, calibration):
    rows = tree_ladder(decoding, calibration)
    assert [(row.tree, row.nodes) for row in rows] == [
        ("plain", 0),
        ("top-1 chain", 3),
        ("stock (Vicuna-7B's)", 61),
        ("searched, stock size", 61),
        ("dynamic, the export's size", 5),
        ("the export's", 5),
    ]
    assert rows[0].acceleration_rate == rows[0].overhead == rows[0].speedup == 1.0
    for row in rows:
        assert row.speedup == pytest.approx(row.acceleration_rate / row.overhead, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 3, 24])
@pytest.mark.parametrize("eos", [(), tuple(range(300))[::7]], ids=["cut", "ended"])
def test_a_replay_of_plain_text_finds_the_rate_of_decoding(exact, finished_run, num_tokens, eos):
    """The rates agree for every tree, cuts and ends included."""
    model, heads = exact
    asked = held_out_prompts(token_rows(finished_run.latest("generate")), 8, 100).kept
    plain = plain_decoder(model, eos_token_ids=eos)
    texts = [plain.generate(prompt.ids, num_tokens).token_ids for prompt in asked]
    ranks = guess_ranks(heads, answer_states(model, heads, asked, texts), 10)
    for choices in (stock_tree(3), cartesian_tree([1, 1, 1]), [(0,), (3,), (0, 1)]):
        decoder = Decoder(model, heads, choices, eos_token_ids=eos)
        decoded = [decoder.generate(prompt.ids, num_tokens) for prompt in asked]
        assert [one.token_ids for one in decoded] == texts
        expected = pytest.approx(acceleration_rate(decoded), nan_ok=True)
        assert replay(ranks, choices).acceleration_rate == expected


def test_a_dynamic_tree_is_compared_with_a_static_one(exact, prompts, calibration):
    plain = plain_decoder(exact[0], eos_token_ids=(1,))
    medusa = Decoder(*exact, DynamicTree(8, 3, 4), eos_token_ids=(1,))
    texts = [plain.generate(prompt.ids, 10).token_ids for prompt in prompts]
    *_, static, own = tree_ladder(Decoding(plain, medusa, prompts, texts), calibration)
    assert (static.tree, own.tree) == ("searched, the export's size", "the export's, dynamic")
    assert own.nodes == 8
    decoded = [medusa.generate(prompt.ids, 10) for prompt in prompts]
    assert own.acceleration_rate == pytest.approx(acceleration_rate(decoded), abs=1e-4)


def test_answers_without_a_step_have_no_figures(decoding, calibration):
    decoding = replace(decoding, answers=[text[:1] for text in decoding.answers])
    rows = tree_ladder(decoding, calibration)
    assert {row.speedup for row in rows} == {None}
    match = GreedyMatch(1, 1, 0)
    studies = Studies(trees=rows)
    native = NativeFigures(acceleration_rate=1.0, greedy_match=match, studies=studies)
    check = CheckFigures(native=native, passed=True, failures=[])
    assert report_texts(Report(check=check), Extras())
