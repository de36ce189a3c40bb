"""A difference between two greedy texts is a tie exactly where the target's own best two logits are that close."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from pipeline.config import CheckConfig
from pipeline.evaluation.answers import compare, gap_of, tie_tolerance
from pipeline.evaluation.prompts import Prompt
from pipeline.targets.spec import TargetSpec


def compared(plain: list[int], other: list[int], gap: float, tolerance: float = 1e-4):
    asked: list[list[int]] = []

    def gap_at(prefix: list[int]) -> float:
        asked.append(prefix)
        return gap

    return compare([Prompt("row", [7, 8])], [plain], [other], gap_at, tolerance), asked


def test_equal_texts_ask_the_target_nothing():
    match, asked = compared([1, 2, 3], [1, 2, 3], 0.0)
    assert match.as_dict() == {"sequences": 1, "identical": 1, "ties": 0} and asked == []


@pytest.mark.parametrize(("gap", "ties"), [(0.0, 1), (1e-4, 1), (1.01e-4, 0), (3.0, 0)])
def test_texts_that_differ_are_ties_by_the_gap_before_their_first_difference(gap, ties):
    match, asked = compared([1, 2, 3, 4, 9], [1, 2, 5, 4, 1], gap)
    assert asked == [[7, 8, 1, 2]]
    assert match.as_dict() == {"sequences": 1, "identical": 0, "ties": ties}
    expected = [{"id": "row", "at": 2, "gap": gap, "plain": [3, 4, 9], "other": [5, 4, 1]}]
    assert match.differing == ([] if ties else expected)


@pytest.mark.parametrize(("plain", "other"), [([1, 2], [1, 2, 3]), ([1, 2, 3], [1, 2])])
def test_a_text_that_ends_earlier_differs_where_it_ends(plain, other):
    match, asked = compared(plain, other, 1.0)
    assert asked == [[7, 8, 1, 2]] and match.differing[0]["at"] == 2


TEXTS = st.lists(st.tuples(*[st.lists(st.integers(0, 2), max_size=5)] * 2), max_size=8)


@given(texts=TEXTS, gaps=st.lists(st.sampled_from([0.0, 1.0]), min_size=8, max_size=8))
def test_every_sequence_is_identical_a_tie_or_named(texts, gaps):
    prompts = [Prompt(str(number), []) for number in range(len(texts))]
    plain, other = [a for a, _ in texts], [b for _, b in texts]
    each = iter(gaps)
    match = compare(prompts, plain, other, lambda prefix: next(each), 0.5)
    assert match.identical == sum(a == b for a, b in texts)
    assert match.identical + match.ties + len(match.differing) == match.sequences == len(texts)


def test_the_gap_is_that_of_the_target_s_next_token(tiny_target):
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    for prefix in ([0, 5, 9], [3, 200, 17, 41, 2]):
        with torch.inference_mode():
            logits = sorted(model(torch.tensor([[*prefix, 0, 0]])).logits[0, len(prefix) - 1].tolist())
        assert gap_of(model)(prefix) == pytest.approx(logits[-1] - logits[-2], abs=1e-5)


def test_the_tolerance_is_the_dtype_s_unless_it_is_set():
    usual = CheckConfig()
    tolerances = [tie_tolerance(TargetSpec("x", dtype=dtype), usual) for dtype in ("float32", "float16", "bfloat16")]
    assert tolerances[0] == 1e-4 and tolerances == sorted(tolerances)
    assert tie_tolerance(TargetSpec("x", dtype="bfloat16"), CheckConfig(tie_tolerance=0)) == 0
