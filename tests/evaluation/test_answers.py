"""Greedy answers compared, and the answers file as Spec-Bench's own evaluation reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from pipeline.artifacts.check_result import Difference, GreedyMatch
from pipeline.config import CheckConfig
from pipeline.decoding.decoder import Decoded
from pipeline.evaluation.answers import answer_lines, compare, samples, tie_tolerance, top_2_gap
from pipeline.evaluation.prompts import Prompt
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import TargetSpec
from tests.flows.tiny import read_lines, write_lines


def spec_bench(path: Path) -> tuple[float, float]:
    """The figures of Spec-Bench's evaluation/speed.py: mean tokens per second over the questions,
    and mean accepted tokens over all steps.
    """
    lines = read_lines(path)
    choices = [line["choices"][0] for line in lines]
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices]
    lengths = [length for choice in choices for length in choice["accept_lengths"]]
    return sum(speeds) / len(speeds), sum(lengths) / len(lengths)


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


def test_a_question_is_one_line_that_spec_bench_reads(tokenizer, tmp_path):
    def answer(letters: str, accepted: list[int], first: float, seconds: float, *end: str):
        ids = tokenizer.convert_tokens_to_ids([*letters, *end])
        assert len(ids) == 1 + sum(accepted)
        return Decoded(ids, "stop" if end else "length", accepted, first, seconds)

    prompts = [
        Prompt("q:0/0", [5], "writing", 81),
        Prompt("q:0/1", [5, 6], "writing", 81),
        Prompt("seeds:7", [7], "math"),
    ]
    fast = [
        answer("green", [3, 1], 0.1, 0.4),
        answer("no", [1], 0.1, 0.4),
        answer("why", [3], 0.2, 0.3, "</s>"),
    ]
    slow = [Decoded(one.token_ids, one.finished, one.accepted, 9.0, 9.0) for one in fast]
    lines = answer_lines("chat-medusa", tokenizer, prompts, [fast, slow, fast])
    first, second = lines
    assert first.keys() >= {"answer_id", "tstamp"} and first["model_id"] == "chat-medusa"
    assert (first["question_id"], first["category"]) == (81, "writing")
    assert first["choices"] == [
        {
            "index": 0,
            "turns": ["green", "no"],
            "decoding_steps": [2, 1],
            "new_tokens": [5, 2],
            "wall_time": [pytest.approx(0.5), pytest.approx(0.5)],
            "accept_lengths": [3, 1, 1],
        }
    ]
    assert second["question_id"] == "seeds:7" and first["answer_id"] != second["answer_id"]
    assert second["choices"][0]["turns"] == ["why"], "no end token in the text"
    path = tmp_path / "medusa.jsonl"
    write_lines(path, *lines)
    speed, length = (7 / 1.0 + 4 / 0.5) / 2, (3 + 1 + 1 + 3) / 4
    assert spec_bench(path) == (pytest.approx(speed), pytest.approx(length))


def test_a_sample_shows_each_token_once_with_its_step(tokenizer):
    text = "the moon 月 sings"
    ids = tokenizer(text)["input_ids"]
    given = Decoded(ids, "length", [2, len(ids) - 3], 0.1, 0.1)
    (sample,) = samples(tokenizer, [Prompt("a", tokenizer("why")["input_ids"])], [given])
    assert sample.prompt == "why"
    assert "".join(token.text for token in sample.tokens) == text
    assert [token.step for token in sample.tokens] == [0, 1, 1, *[2] * (len(ids) - 3)]


def test_samples_are_the_longest_answers(tokenizer):
    texts = ["no", "the moon sings twice, the moon sings", "-s.", "a green field"]
    prompts = [Prompt(text, tokenizer(text)["input_ids"]) for text in texts]
    answers = [Decoded(one.ids, "length", [len(one.ids) - 1], 0.1, 0.1) for one in prompts]
    found = samples(tokenizer, prompts, answers)
    assert [one.prompt for one in found] == [texts[1], texts[3]]


@pytest.mark.parametrize(
    ("plain", "other", "gap", "ties"),
    [
        ([1, 2, 3, 4, 9], [1, 2, 5, 4, 1], 1e-4, 1),
        ([1, 2, 3, 4, 9], [1, 2, 5, 4, 1], 1.01e-4, 0),
        ([1, 2], [1, 2, 3], 3.0, 0),
    ],
)
def test_a_tie_is_judged_before_the_first_difference(plain, other, gap, ties):
    asked: list[list[int]] = []

    def gap_at(prefix: list[int]) -> float:
        asked.append(prefix)
        return gap

    prompts = [Prompt("same", [9]), Prompt("row", [7, 8])]
    found = compare(prompts, [[3, 4], plain], [[3, 4], other], gap_at, 1e-4)
    assert asked == [[7, 8, 1, 2]] and found.match == GreedyMatch(2, 1, ties)
    differing = Difference("row", 2, gap, plain[2:][:4], other[2:][:4])
    assert found.differing == ([] if ties else [differing])
    assert found.largest_gap == (None if ties else pytest.approx(gap, rel=1e-2))


def test_the_gap_is_that_of_the_target_s_next_token(model):
    for prefix in ([0, 5, 9], [3, 200, 17, 41, 2]):
        with torch.inference_mode():
            logits_TV = model(torch.tensor([[*prefix, 0, 0]])).logits[0]
        *_, second, best = sorted(logits_TV[len(prefix) - 1].tolist())
        assert top_2_gap(model, prefix) == pytest.approx(best - second, abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "tolerance"),
    [
        ({"dtype": "float32"}, 1e-4),
        ({"dtype": "float16"}, 0.0625),
        ({"dtype": "bfloat16"}, 0.5),
        ({"dtype": "float16", "quantization": "4bit"}, 0.5),
        ({"dtype": "float32", "rounding": "8bit"}, 0.5),
    ],
)
def test_the_tolerance_is_the_coarsest_rounding_s_unless_set(spec, tolerance):
    target = TargetSpec("x", **spec)
    assert tie_tolerance(target, CheckConfig()) == tolerance
    assert tie_tolerance(target, CheckConfig(tie_tolerance=0)) == 0


@pytest.mark.parametrize("bits", [None, "8bit", "4bit"])
def test_the_tolerance_covers_the_rounding_of_bitsandbytes(tiny_target, bits):
    """The same positions at once, and one after another from the cache.

    8-bit layers round on every CPU; 4-bit ones only where bitsandbytes multiplies them in bfloat16,
    with AVX-512.
    """
    spec = TargetSpec(str(tiny_target), quantization=bits)
    model, ids, cache, gap = load_causal_lm(spec, "cpu", 1), torch.arange(5, 45), None, 0.0
    with torch.inference_mode():
        at_once = model(ids[None]).logits[0]
        for position in range(len(ids)):
            step = model(ids[None, position, None], past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            gap = max(gap, float((step.logits[0, 0] - at_once[position]).abs().max()))
    assert gap < tie_tolerance(spec, CheckConfig())
    assert bits != "8bit" or gap > tie_tolerance(TargetSpec("x"), CheckConfig())
