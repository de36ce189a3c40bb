"""Figures of methods in vLLM, from texts and times that are given here."""

from __future__ import annotations

import pytest

from pipeline.artifacts.check_result import GreedyMatch
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.served_figures import load_rows_of_check, served_method
from pipeline.targets.vllm_decode import VLLMTexts

CONFIG = {"method": "ngram", "num_speculative_tokens": 4}
MATCH = GreedyMatch(3, 3, 0)


def test_rates_are_of_all_prompts_and_by_category():
    """The third answer ended with its first token."""
    prompts = [Prompt("a", [1], "maths"), Prompt("b", [2], "poems"), Prompt("c", [3], "poems")]
    texts = VLLMTexts([[1, 2, 3], [4, 5], [6]], [[2], [1], []], [2.0], [6.0])
    found = served_method("ngram", CONFIG, prompts, texts, MATCH)
    assert (found.acceleration_rate, found.greedy_match) == (1.5, MATCH)
    assert found.categories == {"maths": 2.0, "poems": 1.0} and found.speculative_config == CONFIG


def test_speeds_are_medians_of_the_repeats_beside_plain_ones():
    """Six tokens in 1, 2 and 4 seconds at once and in 6 in turn; plain in twice as long."""
    prompts = [Prompt("a", [1]), Prompt("b", [2])]
    tokens, steps = [[1, 2, 3], [4, 5, 6]], [[2], [2]]
    texts = VLLMTexts(tokens, steps, [2.0, 1.0, 4.0], [6.0])
    plain = VLLMTexts(tokens, [[1, 1], [1, 1]], [4.0], [12.0])
    method = served_method("ngram", CONFIG, prompts, texts, MATCH)
    in_turn, at_once = load_rows_of_check(method, plain, texts)
    assert (in_turn.requests, in_turn.tokens_per_second, in_turn.range) == (1, 1.0, None)
    assert (at_once.requests, at_once.tokens_per_second, at_once.range) == (2, 3.0, [1.5, 6.0])
    assert (in_turn.speedup, at_once.speedup) == (2.0, 2.0)
    assert at_once.baseline_tokens_per_second == 1.5 and at_once.acceleration_rate == 2.0


@pytest.mark.parametrize(
    ("number", "speeds"), [(1, {1: 2}), (2, {1: 4, 2: 4}), (9, {1: 16, 9: 18})]
)
def test_eight_prompts_at_most_are_decoded_in_turn(number, speeds):
    """Two tokens each, all of them in one second."""
    prompts = [Prompt(str(place), [place]) for place in range(number)]
    texts = VLLMTexts([[1, 2]] * number, [[1]] * number, [1.0], [1.0])
    method = served_method("ngram", CONFIG, prompts, texts, MATCH)
    rows = load_rows_of_check(method, texts, texts)
    assert {row.requests: row.tokens_per_second for row in rows} == speeds
