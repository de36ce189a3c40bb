"""Samples of answers, and the answers file as Spec-Bench's own evaluation reads it."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.decoding.decoder import Decoded
from pipeline.evaluation.answers import answer_lines, samples
from pipeline.evaluation.prompts import Prompt
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
