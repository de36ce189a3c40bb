"""Figures of methods in vLLM, from texts and times that are given here."""

from __future__ import annotations

from pipeline.artifacts.check_result import GreedyMatch
from pipeline.evaluation.prompts import Prompt
from pipeline.evaluation.served_figures import load_rows_of_check, prompts_in_turn, served_method
from pipeline.targets.vllm_decode import VLLMTexts

CONFIG = {"method": "ngram", "num_speculative_tokens": 4}
MATCH = GreedyMatch(3, 3, 0, 500)


def test_rates_are_of_all_prompts_and_by_category():
    """The third answer ended with its first token."""
    prompts = [Prompt("a", [1], "maths"), Prompt("b", [2], "poems"), Prompt("c", [3], "poems")]
    texts = VLLMTexts([[1, 2, 3], [4, 5], [6]], [[2], [1], []], [2.0], [{0: 1.0}])
    found = served_method("ngram", CONFIG, prompts, texts, MATCH)
    assert (found.acceleration_rate, found.greedy_match) == (1.5, MATCH)
    maths, poems = found.categories
    assert (maths.category, maths.prompts, maths.acceleration_rate) == ("maths", 1, 2.0)
    assert (poems.category, poems.prompts, poems.acceleration_rate) == ("poems", 2, 1.0)
    assert found.speculative_config == CONFIG
    one = VLLMTexts([[1, 2, 3]], [[2]], [2.0], [{0: 1.0}])
    assert served_method("ngram", CONFIG, prompts[:1], one, MATCH).categories is None


def test_speeds_are_medians_of_the_repeats_beside_plain_ones():
    """Six tokens in 1, 2 and 4 seconds at once and in 6 in turn; plain in twice as long."""
    prompts = [Prompt("a", [1]), Prompt("b", [2])]
    tokens, steps = [[1, 2, 3], [4, 5, 6]], [[2], [2]]
    texts = VLLMTexts(tokens, steps, [2.0, 1.0, 4.0], [{0: 2.0, 1: 4.0}])
    plain = VLLMTexts(tokens, [[1, 1], [1, 1]], [4.0], [{0: 5.0, 1: 7.0}])
    method = served_method("ngram", CONFIG, prompts, texts, MATCH)
    in_turn, at_once = load_rows_of_check(method, plain, texts)
    assert (in_turn.requests, in_turn.tokens_per_second, in_turn.range) == (1, 1.0, None)
    assert (at_once.requests, at_once.tokens_per_second, at_once.range) == (2, 3.0, [1.5, 6.0])
    assert (in_turn.speedup, at_once.speedup) == (2.0, 2.0)
    assert at_once.baseline_tokens_per_second == 1.5 and at_once.acceleration_rate == 2.0


def test_the_rate_one_at_a_time_is_that_of_the_prompts_decoded_so():
    """The first text gains 4, which is more than the pooled rate of 2.5."""
    prompts = [Prompt("a", [1]), Prompt("b", [2])]
    texts = VLLMTexts([[0] * 5] * 2, [[4], [1]], [1.0], [{0: 1.0}])
    method = served_method("ngram", CONFIG, prompts, texts, MATCH)
    in_turn, at_once = load_rows_of_check(method, texts, texts)
    assert (in_turn.acceleration_rate, at_once.acceleration_rate) == (4.0, 2.5)


def test_a_few_prompts_are_decoded_in_turn():
    """Each of another question, from anywhere in the file."""
    prompts = [Prompt(str(place), [place], question_id=place // 2) for place in range(40)]
    chosen = prompts_in_turn(prompts)
    assert len({place // 2 for place in chosen}) == len(chosen) == 8 and max(chosen) > 16
