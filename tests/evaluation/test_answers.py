"""The answers file, read as Spec-Bench's own evaluation reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.artifacts.check_result import Difference, GreedyMatch
from pipeline.config import CheckConfig
from pipeline.decoding.decoder import Decoded
from pipeline.evaluation.answers import answer_lines, compare, samples, tie_tolerance, top_2_gap
from pipeline.evaluation.prompts import Prompt
from pipeline.targets.loading import load_causal_lm
from pipeline.targets.spec import TargetSpec


def spec_bench(path: Path, category: str | None = None) -> tuple[float, float]:
    """What Spec-Bench's evaluation/speed.py makes of a method's file: mean tokens per second over
    the questions, and mean accepted tokens over all steps. Its categories are those of the file;
    None takes all."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    choices = [line["choices"][0] for line in lines if category in (None, line["category"])]
    speeds = [sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in choices]
    lengths = [length for choice in choices for length in choice["accept_lengths"]]
    return sum(speeds) / len(speeds), sum(lengths) / len(lengths)


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


def answer(
    tokenizer, letters: str, accepted: list[int], first: float, seconds: float, *end: str
) -> Decoded:
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
    assert spec_bench(path) == (
        pytest.approx((7 / 1.0 + 4 / 0.5) / 2),
        pytest.approx((3 + 1 + 1 + 3) / 4),
    )
    assert spec_bench(path, "math") == (pytest.approx(4 / 0.5), pytest.approx(3.0))


def test_a_question_is_one_line_with_its_turns_in_order(lines):
    assert [set(line) for line in lines] == [
        {"question_id", "category", "answer_id", "model_id", "choices", "tstamp"},
    ] * 2
    first, second = lines
    assert (first["question_id"], first["category"], first["model_id"]) == (
        81,
        "writing",
        "chat-medusa",
    )
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
    assert second["choices"][0]["turns"] == ["why"], (
        "no end token in the text, as the field's files have it"
    )
    assert first["answer_id"] != second["answer_id"]


def test_prompts_of_no_question_are_named_by_their_row(tokenizer):
    (line,) = answer_lines(
        "m", tokenizer, [Prompt("seeds:7", [5])], [[answer(tokenizer, "no", [1], 0.1, 0.1)]]
    )
    assert (line["question_id"], line["category"]) == ("seeds:7", "")


def test_a_sample_shows_each_token_once_with_the_step_that_gave_it(tokenizer):
    text = "the moon 月 sings"
    ids = tokenizer(text)["input_ids"]
    given = Decoded(ids, "length", [2, len(ids) - 3], 0.1, 0.1)
    (sample,) = samples(tokenizer, [Prompt("a", tokenizer("why")["input_ids"])], [given])
    assert sample.prompt == "why"
    assert "".join(token.text for token in sample.tokens) == text
    assert [token.step for token in sample.tokens] == [0, 1, 1, *[2] * (len(ids) - 3)]


def compared(plain: list[int], other: list[int], gap: float, tolerance: float = 1e-4):
    asked: list[list[int]] = []

    def gap_at(prefix: list[int]) -> float:
        asked.append(prefix)
        return gap

    return compare([Prompt("row", [7, 8])], [plain], [other], gap_at, tolerance), asked


def test_equal_texts_ask_the_target_nothing():
    match, asked = compared([1, 2, 3], [1, 2, 3], 0.0)
    assert match.match == GreedyMatch(1, 1, 0) and asked == []


@pytest.mark.parametrize(("gap", "ties"), [(0.0, 1), (1e-4, 1), (1.01e-4, 0), (3.0, 0)])
def test_texts_that_differ_are_ties_by_the_gap_before_their_first_difference(gap, ties):
    match, asked = compared([1, 2, 3, 4, 9], [1, 2, 5, 4, 1], gap)
    assert asked == [[7, 8, 1, 2]]
    assert match.match == GreedyMatch(1, 0, ties)
    expected = [Difference("row", 2, gap, [3, 4, 9], [5, 4, 1])]
    assert match.differing == ([] if ties else expected)


@pytest.mark.parametrize(("plain", "other"), [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2])])
def test_a_text_that_ends_earlier_differs_where_it_ends(plain, other):
    match, asked = compared(plain, other, 1.0)
    assert asked == [[7, 8, 1, 2]] and match.differing[0].at == 2


TEXTS = st.lists(st.tuples(*[st.lists(st.integers(0, 2), max_size=5)] * 2), max_size=8)


@given(texts=TEXTS, gaps=st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8))
def test_every_sequence_is_identical_a_tie_or_named(texts, gaps):
    prompts = [Prompt(str(number), []) for number in range(len(texts))]
    plain, other = [a for a, _ in texts], [b for _, b in texts]
    each = iter(gaps)
    found = compare(prompts, plain, other, lambda prefix: next(each), 0.5)
    assert found.match.identical == sum(a == b for a, b in texts)
    assert found.match.differing == len(found.differing) and found.match.sequences == len(texts)


def test_the_gap_is_that_of_the_target_s_next_token(tiny_target):
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    for prefix in ([0, 5, 9], [3, 200, 17, 41, 2]):
        with torch.inference_mode():
            logits = sorted(
                model(torch.tensor([[*prefix, 0, 0]])).logits[0, len(prefix) - 1].tolist()
            )
        assert top_2_gap(model, prefix) == pytest.approx(logits[-1] - logits[-2], abs=1e-5)


def test_the_tolerance_is_the_dtype_s_unless_it_is_set():
    usual = CheckConfig()
    dtypes = ("float32", "float16", "bfloat16")
    tolerances = [
        tie_tolerance(TargetSpec("x", dtype=dtype), usual, on_gpu=False) for dtype in dtypes
    ]
    assert tolerances[0] == 1e-4 and tolerances == sorted(tolerances)
    for spec in (TargetSpec("x", dtype="bfloat16"), TargetSpec("x", quantization="8bit")):
        assert tie_tolerance(spec, CheckConfig(tie_tolerance=0), on_gpu=False) == 0


@pytest.mark.parametrize("named", ["quantization", "rounding"])
def test_4_bit_layers_are_as_coarse_as_bfloat16_on_a_cpu_alone_and_8_bit_ones_anywhere(named):
    """A GPU multiplies bitsandbytes' 4-bit layers in the dtype of the states; 8-bit ones round
    these to 127 steps.
    """
    found = {
        (bits, on_gpu): tie_tolerance(
            TargetSpec("x", dtype="float16", **{named: bits}), CheckConfig(), on_gpu=on_gpu
        )
        for bits in ("4bit", "8bit")
        for on_gpu in (False, True)
    }
    of_float16, of_bfloat16 = 0.0625, 0.5
    assert found == {
        ("4bit", False): of_bfloat16,
        ("4bit", True): of_float16,
        ("8bit", False): of_bfloat16,
        ("8bit", True): of_bfloat16,
    }


def test_the_tolerance_of_bitsandbytes_covers_what_its_rounding_makes_of_one_forward_and_many(
    tiny_target,
):
    """The same positions at once, and one after another from the cache; in float32 they are equal
    up to 1e-4.

    8-bit layers round on every CPU; 4-bit ones only where bitsandbytes multiplies them in bfloat16,
    with AVX-512.
    """
    largest = {}
    for bits in (None, "8bit", "4bit"):
        spec = TargetSpec(str(tiny_target), quantization=bits)
        model = load_causal_lm(spec, "cpu", 1)
        ids = torch.arange(5, 85)[None]
        with torch.inference_mode():
            at_once, cache, steps = model(ids).logits[0].double(), None, []
            for position in range(ids.shape[1]):
                step = model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
                cache, steps = step.past_key_values, [*steps, step.logits[0].double()]
        largest[bits] = float((torch.cat(steps) - at_once).abs().max())
        assert largest[bits] < tie_tolerance(spec, CheckConfig(), on_gpu=False)
    assert largest["8bit"] > tie_tolerance(TargetSpec("x"), CheckConfig(), on_gpu=False)
