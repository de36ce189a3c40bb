"""The studies' rows: what each row decodes with, and what must hold between rows whatever a
machine's speed.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.artifacts.json_form import to_json
from pipeline.artifacts.tree_file import Calibration, read_calibration
from pipeline.config import CheckConfig
from pipeline.decoding.acceptance import TypicalAcceptance, greedy_acceptance
from pipeline.decoding.decoder import Decoder, acceleration_rate, plain_decoder
from pipeline.decoding.dynamic_tree import DynamicTree
from pipeline.decoding.held_out import simulated_acceleration_rate
from pipeline.decoding.stock_trees import stock_tree
from pipeline.decoding.tree import cartesian_tree
from pipeline.evaluation import studies
from pipeline.evaluation.answer_states import answer_states, guess_ranks
from pipeline.evaluation.overhead import with_tree
from pipeline.evaluation.prompts import Prompt, held_out_prompts
from pipeline.evaluation.studies import Side, chain_rate, searched_tree
from pipeline.export.directory import read_heads
from pipeline.report.documents import report_texts
from tests.decoding.test_cuda_graphs import Tape
from tests.flows.tiny import token_rows

SETTINGS = CheckConfig(max_new_tokens=10, engines=("native",))
TREE = [(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]


@pytest.fixture(scope="module")
def model(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def calibration(finished_run) -> Calibration:
    return read_calibration(finished_run.path / "latest/calibrate")


@pytest.fixture(scope="module")
def plain(model) -> Decoder:
    return plain_decoder(model, eos_token_ids=(1,))


@pytest.fixture(scope="module")
def medusa(model, finished_run) -> Decoder:
    heads = read_heads(finished_run.path / "latest/export", model)
    return Decoder(model, heads, TREE, eos_token_ids=(1,))


@pytest.fixture(scope="module")
def prompts(finished_run) -> list[Prompt]:
    return held_out_prompts(token_rows(finished_run.latest("generate")), 3, 100).kept


@pytest.fixture(scope="module")
def texts(plain, prompts) -> list[list[int]]:
    return [plain.generate(prompt.ids, 10).token_ids for prompt in prompts]


def run_studies(names, plain, accelerated, prompts, settings, calibration, answers):
    asked = settings.model_copy(update={"studies": names})
    found = studies.run_studies(asked, plain, accelerated, prompts, answers, calibration)
    return {} if found is None else to_json(found)


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    monkeypatch.setattr(studies, "NUM_PROMPTS", 2)
    monkeypatch.setattr(studies, "TEMPERATURES", (0.8,))
    monkeypatch.setattr(studies, "EPS", (0.04, 0.25))
    monkeypatch.setattr(studies, "BATCH_SIZES", (1, 4))


def test_the_ladder_of_trees_goes_from_plain_decoding_to_the_export_s_tree(
    plain, medusa, prompts, texts, calibration
):
    (rows,) = run_studies(("trees",), plain, medusa, prompts, SETTINGS, calibration, texts).values()
    assert [(row["tree"], row["nodes"]) for row in rows] == [
        ("plain", 0),
        ("top-1 chain", 3),
        ("Cartesian 4x2x2", 4 + 4 * 2 + 4 * 2 * 2),
        ("stock (Vicuna-7B's)", 61),
        ("searched, stock size", 61),
        ("dynamic, the export's size", 5),
        ("the export's", 5),
    ]
    assert rows[0]["acceleration_rate"] == rows[0]["overhead"] == rows[0]["speedup"] == 1.0
    for row in rows:
        assert row["speedup"] == pytest.approx(row["acceleration_rate"] / row["overhead"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 10, 24])
@pytest.mark.parametrize("eos", [(), tuple(range(300))[::7]], ids=["cut", "ended"])
def test_a_walk_through_plain_text_finds_the_very_rate_that_decoding_with_the_tree_has(
    model, finished_run, num_tokens, eos
):
    """Of every tree, cuts and ends included; in float64, where no near-tie can blur it."""
    model = copy.deepcopy(model).double()
    heads = read_heads(finished_run.path / "latest/export", model).double()
    asked = held_out_prompts(token_rows(finished_run.latest("generate")), 8, 100).kept
    plain = plain_decoder(model, eos_token_ids=eos)
    texts = [plain.generate(prompt.ids, num_tokens).token_ids for prompt in asked]
    ranks = guess_ranks(heads, answer_states(model, heads, asked, texts), 10)
    for choices in (stock_tree(3), cartesian_tree([1, 1, 1]), [(0,), (3,), (0, 1)]):
        decoder = Decoder(model, heads, choices, eos_token_ids=eos)
        decoded = [decoder.generate(prompt.ids, num_tokens) for prompt in asked]
        assert [one.token_ids for one in decoded] == texts
        assert simulated_acceleration_rate(ranks, choices) == pytest.approx(
            acceleration_rate(decoded), nan_ok=True
        )


def test_the_chain_s_rate_on_the_answers_is_that_of_decoding_with_it(plain, medusa, prompts):
    texts = [plain.generate(prompt.ids, 12).token_ids for prompt in prompts]
    for num_tokens in (1, 3):
        decoder = with_tree(medusa, cartesian_tree([1] * num_tokens))
        decoded = [
            decoder.generate(prompt.ids, len(text))
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        figures = chain_rate(medusa, prompts, texts, num_tokens)
        assert figures.acceleration_rate == pytest.approx(acceleration_rate(decoded), abs=1e-4)
        assert figures.draft_tokens == num_tokens


def test_the_tree_of_the_stock_s_size_is_the_search_s_own_or_the_product_of_accuracies():
    own = Calibration(
        choices=(),
        node_shares=[],
        accuracies=[[0.5, 0.1], [0.4, 0.2]],
        expected_acceleration_rate=1.0,
        num_speculative_tokens=2,
        chain=[],
    )
    searched = replace(own, searched=((0,), (0, 0), (1,)))
    assert searched_tree(searched) == ((0,), (0, 0), (1,))
    assert searched_tree(own) == ((0,), (0, 0), (1,), (0, 1), (1, 0), (1, 1))


def test_calibration_keeps_its_search_up_to_the_stock_size_whatever_the_tree_s(calibration):
    assert len(calibration.choices) == 8 and len(calibration.searched) == 63
    assert calibration.searched[:8] == calibration.choices


def test_sampling_exactly_writes_the_text_of_plain_sampling(plain, medusa, prompts):
    """Greedily and by rejection: so the target finds either side's text equally likely."""
    (rows,) = run_studies(("typical",), plain, medusa, prompts, SETTINGS, None, []).values()
    found = {(row["temperature"], row["rule"], row.get("eps")): row for row in rows}
    assert found.keys() == {
        (0.0, "plain", None),
        (0.0, "greedy", None),
        (0.8, "plain", None),
        (0.8, "rejection", None),
        (0.8, "typical", 0.04),
        (0.8, "typical", 0.25),
    }
    for temperature, exact in ((0.0, "greedy"), (0.8, "rejection")):
        plainly, tree = found[temperature, "plain", None], found[temperature, exact, None]
        assert plainly["log_likelihood"] == pytest.approx(tree["log_likelihood"], abs=1e-4)
        assert plainly["acceleration_rate"] == 1.0 <= tree["acceleration_rate"]
    assert found[0.8, "plain", None]["log_likelihood"] < found[0.0, "plain", None]["log_likelihood"]


def test_delta_is_the_root_of_eps_in_every_typical_row(plain, medusa, prompts, monkeypatch):
    sides: list[Side] = []
    monkeypatch.setattr(studies, "_rows_of_rules", lambda given, *_: sides.extend(given) or [])
    settings = SETTINGS.model_copy(update={"first_token": "sampled"})
    run_studies(("typical",), plain, medusa, prompts, settings, None, [])
    rules = [(side.eps, side.rule) for side in sides if side.name == "typical"]
    assert rules == [
        (0.04, TypicalAcceptance(0.8, eps=0.04, delta=0.2, samples=True)),
        (0.25, TypicalAcceptance(0.8, eps=0.25, delta=0.5, samples=True)),
    ]


def test_heads_are_used_up_to_each_depth_of_the_tree(model, finished_run, prompts):
    """And each depth has the rate that decoding has with it; in float64, where no near-tie can blur
    it.
    """
    model = copy.deepcopy(model).double()
    heads = read_heads(finished_run.path / "latest/export", model).double()
    plain = plain_decoder(model, eos_token_ids=(1,))
    medusa = Decoder(model, heads, TREE, eos_token_ids=(1,))
    texts = [plain.generate(prompt.ids, 10).token_ids for prompt in prompts]
    (rows,) = run_studies(("heads",), plain, medusa, prompts, SETTINGS, None, texts).values()
    assert [(row["heads"], row["nodes"]) for row in rows] == [(1, 2), (2, 4), (3, 5)]
    for row in rows:
        tree = [path for path in TREE if len(path) <= row["heads"]]
        decoder = Decoder(model, heads, tree, eos_token_ids=(1,))
        decoded = [decoder.generate(prompt.ids, 10) for prompt in prompts]
        assert row["acceleration_rate"] == pytest.approx(acceleration_rate(decoded), abs=1e-4)


@pytest.mark.slow
def test_a_dynamic_tree_stands_beside_the_static_one_of_its_size_and_is_cut_at_each_depth(
    model, finished_run, prompts, calibration
):
    """With the rates that decoding has with it; in float64, where no near-tie can blur it."""
    model = copy.deepcopy(model).double()
    heads = read_heads(finished_run.path / "latest/export", model).double()
    plain = plain_decoder(model, eos_token_ids=(1,))
    tree = DynamicTree(8, 3, 4)
    grown = Decoder(model, heads, tree, eos_token_ids=(1,))
    texts = [plain.generate(prompt.ids, 10).token_ids for prompt in prompts]
    found = run_studies(("trees", "heads"), plain, grown, prompts, SETTINGS, calibration, texts)
    assert [(row["tree"], row["nodes"]) for row in found["trees"][-2:]] == [
        ("searched, the export's size", 8),
        ("the export's, dynamic", 8),
    ]
    assert [(row["heads"], row["nodes"]) for row in found["heads"]] == [(1, 4), (2, 8), (3, 8)]
    assert found["heads"][-1]["acceleration_rate"] == found["trees"][-1]["acceleration_rate"]
    for row in found["heads"]:
        decoder = Decoder(model, heads, tree.resized(8, row["heads"]), eos_token_ids=(1,))
        decoded = [decoder.generate(prompt.ids, 10) for prompt in prompts]
        assert row["acceleration_rate"] == pytest.approx(acceleration_rate(decoded), abs=1e-4)
    assert report_texts({"check": {"native": {"studies": found}}}, {})


@pytest.fixture
def asked_of(monkeypatch):
    """What a decoder is asked for in batches from now on: (texts, tokens)."""

    def listen(decoder: Decoder) -> list[tuple[list[list[int]], int]]:
        asked, generate = [], decoder.generate_batch

        def generate_batch(ids, num_tokens):
            asked.append((ids, num_tokens))
            return generate(ids, num_tokens)

        monkeypatch.setattr(decoder, "generate_batch", generate_batch)
        return asked

    return listen


@pytest.mark.parametrize("repeats", [1, 2])
def test_every_batch_size_decodes_the_same_prompts(
    plain, medusa, prompts, asked_of, monkeypatch, repeats
):
    """Whose rates differ far more than batches of them do. Where they are too few for a batch they
    repeat.
    """
    monkeypatch.setattr(studies, "NUM_PROMPTS", 3)
    monkeypatch.setattr(studies, "BATCH_SIZES", (1, 2, 4))
    both = asked_of(plain), asked_of(medusa)
    settings = SETTINGS.model_copy(update={"repeats": repeats})
    (rows,) = run_studies(("batch",), plain, medusa, prompts, settings, None, []).values()
    one, other, _ = (prompt.ids for prompt in prompts)
    for asked in both:
        timed = [texts for texts, num_tokens in asked if num_tokens == 10]
        assert timed == [
            *[[one], [other]] * repeats,
            *[[one, other]] * repeats,
            *[[one, other] * 2] * repeats,
        ]
    assert [row["batch_size"] for row in rows] == [1, 2, 4]
    for row in rows:
        assert row["speedup"] == pytest.approx(
            row["tokens_per_second"] / row["baseline_tokens_per_second"], rel=1e-2
        )


def test_answers_without_a_step_have_no_figures_and_the_report_is_written(
    tmp_path, plain, medusa, prompts, texts
):
    settings = SETTINGS.model_copy(update={"max_new_tokens": 1})
    found = run_studies(
        ("trees", "heads"), plain, medusa, prompts, settings, None, [text[:1] for text in texts]
    )
    assert not any("speedup" in row for rows in found.values() for row in rows)
    assert report_texts({"check": {"native": {"studies": found}}}, {})


def test_only_what_is_asked_for_is_studied(plain, medusa, prompts):
    assert run_studies((), plain, medusa, prompts, SETTINGS, None, []) == {}


def test_steps_are_captured_before_they_are_timed(model, medusa, prompts, monkeypatch):
    """On a GPU a capture takes seconds; here operators are recorded in its place."""
    tape, events, generate = Tape(), [], Decoder.generate
    capture = tape.capture
    monkeypatch.setattr(tape, "capture", lambda step: (events.append("capture"), capture(step))[1])
    monkeypatch.setattr(
        Decoder, "generate", lambda *words: (events.append("decode"), generate(*words))[1]
    )
    plain = Decoder(model, None, (), eos_token_ids=(1,), graph_capture=tape)
    with_tree = Decoder(
        model, medusa.heads, medusa.tree.choices, eos_token_ids=(1,), graph_capture=tape
    )
    sides = [
        Side(name, None, decoder, greedy_acceptance)
        for name, decoder in (("plain", plain), ("tree", with_tree))
    ]
    monkeypatch.setattr("pipeline.decoding.cache._GRANULE", 8)  # a text outgrows several
    studies._rows_of_rules(sides, 0.0, prompts, 40)
    decoded = [place for place, event in enumerate(events) if event == "decode"]
    first_timed = decoded[len(sides) * len(prompts)]
    assert "capture" in events[:first_timed] and "capture" not in events[first_timed:]


def test_batches_are_captured_before_they_are_timed(model, medusa, prompts, monkeypatch):
    """Also of the few texts that are left when others have ended."""
    tape, events = Tape(), []
    capture, clock = tape.capture, studies.perf_counter
    monkeypatch.setattr(tape, "capture", lambda step: (events.append("capture"), capture(step))[1])
    monkeypatch.setattr(studies, "perf_counter", lambda: (events.append("clock"), clock())[1])
    monkeypatch.setattr(studies, "BATCH_SIZES", (4,))
    monkeypatch.setattr(studies, "NUM_PROMPTS", 3)
    ends = tuple(range(300))[::7]
    plain = Decoder(model, None, (), eos_token_ids=ends, graph_capture=tape)
    with_tree = Decoder(model, medusa.heads, TREE, eos_token_ids=ends, graph_capture=tape)
    monkeypatch.setattr("pipeline.decoding.cache._GRANULE", 8)
    studies.batch_sizes(plain, with_tree, prompts, 40, 2)
    first_timed = events.index("clock")
    assert "capture" in events[:first_timed] and "capture" not in events[first_timed:]
