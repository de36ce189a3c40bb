"""The answers file, read as Spec-Bench's own evaluation reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipeline.decoding.decoder import Decoded
from pipeline.evaluation.answers import answer_lines, samples
from pipeline.evaluation.prompts import Prompt


def spec_bench(path: Path, category: str | None = None) -> tuple[float, float]:
    """What Spec-Bench's evaluation/speed.py makes of a method's file: mean tokens per second over the questions, and
    mean accepted tokens over all steps. Its categories are those of the file; None takes all."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    choices = [line["choices"][0] for line in lines if category in (None, line["category"])]
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices]
    lengths = [length for choice in choices for length in choice["accept_lengths"]]
    return sum(speeds) / len(speeds), sum(lengths) / len(lengths)


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


def answer(tokenizer, letters: str, accepted: list[int], first: float, seconds: float, *end: str) -> Decoded:
    """An answer with a token for each letter."""
    ids = tokenizer.convert_tokens_to_ids([*letters, *end])
    assert len(ids) == 1 + sum(accepted)
    return Decoded(ids, "stop" if end else "length", accepted, first, seconds)


@pytest.fixture
def lines(tokenizer):
    prompts = [
        Prompt("q:0/0", [5], "writing", 81, 0),
        Prompt("q:0/1", [5, 6], "writing", 81, 1),
        Prompt("q:1/0", [7], "math", 82, 0),
    ]
    fast = [
        answer(tokenizer, "green", [3, 1], 0.1, 0.4),
        answer(tokenizer, "no", [1], 0.1, 0.4),
        answer(tokenizer, "why", [3], 0.2, 0.3, "</s>"),
    ]
    slow = [Decoded(one.token_ids, one.finished, one.accepted, 9.0, 9.0) for one in fast]
    return answer_lines("chat-medusa", tokenizer, prompts, [fast, slow, fast])


def test_spec_bench_s_own_figures_come_out_of_the_file(lines, tmp_path):
    path = tmp_path / "medusa.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert spec_bench(path) == (pytest.approx((7 / 1.0 + 4 / 0.5) / 2), pytest.approx((3 + 1 + 1 + 3) / 4))
    assert spec_bench(path, "math") == (pytest.approx(4 / 0.5), pytest.approx(3.0))


def test_a_question_is_one_line_with_its_turns_in_order(lines):
    assert [set(line) for line in lines] == [
        {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"},
    ] * 2
    first, second = lines
    assert (first["question_id"], first["category"], first["model_id"]) == (81, "writing", "chat-medusa")
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
    assert second["choices"][0]["turns"] == ["why"], "no end token in the text, as the field's files have it"
    assert first["answer_id"] != second["answer_id"]


def test_prompts_of_no_question_are_named_by_their_row(tokenizer):
    (line,) = answer_lines("m", tokenizer, [Prompt("seeds:7", [5])], [[answer(tokenizer, "no", [1], 0.1, 0.1)]])
    assert (line["question_id"], line["category"]) == ("seeds:7", "")


def test_a_sample_shows_each_token_once_with_the_step_that_gave_it(tokenizer):
    text = "the moon 月 sings"
    ids = tokenizer(text)["input_ids"]
    given = Decoded(ids, "length", [2, len(ids) - 3], 0.1, 0.1)
    (sample,) = samples(tokenizer, [Prompt("a", tokenizer("why")["input_ids"])], [given])
    assert sample["prompt"] == "why"
    assert "".join(token["text"] for token in sample["tokens"]) == text
    assert [token["step"] for token in sample["tokens"]] == [0, 1, 1, *[2] * (len(ids) - 3)]
