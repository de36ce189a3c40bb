"""The methods in vLLM that the heads are compared with, and their figures."""

from __future__ import annotations

import pytest

from pipeline.artifacts.check_result import GreedyMatch, Throughput
from pipeline.config import CheckConfig
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.evaluation.vllm_methods import compared_configs, served_method
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_decode import VLLMTexts

CHAIN = {"method": "eagle", "model": "export", "num_speculative_tokens": 5}


def test_every_method_has_a_configuration_of_its_own():
    settings = CheckConfig(
        engine_baselines=["draft-model", "suffix"], assistant_model="small", draft_tokens=[5, 3]
    )
    request = CheckRequest(
        TargetSpec("large"),
        "export",
        [],
        settings,
        assistant=TargetSpec("small"),
        speculative_config=CHAIN,
    )
    found = compared_configs(request)
    assert list(found) == ["heads, 3", "draft-model", "suffix"], "five are the export's own"
    assert found["heads, 3"] == {**CHAIN, "num_speculative_tokens": 3}
    assert (found["draft-model"]["method"], found["draft-model"]["model"]) == (
        "draft_model",
        "small",
    )
    assert found["suffix"]["method"] == "suffix"


def test_figures_are_of_all_repeats_and_by_category():
    """Six tokens in 1, 2 and 4 seconds; the third answer ended with its first token."""
    prompts = [Prompt("a", [1], "maths"), Prompt("b", [2], "poems"), Prompt("c", [3], "poems")]
    texts = VLLMTexts([[1, 2, 3], [4, 5], [6]], [[2], [1], []], [2.0, 1.0, 4.0], [6.0])
    match = GreedyMatch(3, 3, 0)
    found = served_method("ngram", {"num_speculative_tokens": 4}, prompts, texts, match)
    assert (found.acceleration_rate, found.draft_tokens, found.greedy_match) == (1.5, 4, match)
    assert found.categories == {"maths": 2.0, "poems": 1.0}
    assert found.throughput == [
        Throughput(requests=1, tokens_per_second=1.0),
        Throughput(requests=3, tokens_per_second=3.0, lowest=1.5, highest=6.0),
    ]
    plain = served_method("plain", None, prompts, texts, None)
    assert plain.throughput == found.throughput and plain.acceleration_rate is None


@pytest.mark.parametrize(
    ("number", "speeds"), [(1, {1: 2}), (2, {1: 4, 2: 4}), (9, {1: 16, 9: 18})]
)
def test_eight_prompts_at_most_are_decoded_in_turn(number, speeds):
    """Two tokens each, all of them in one second."""
    prompts = [Prompt(str(place), [place]) for place in range(number)]
    texts = VLLMTexts([[1, 2]] * number, [[1]] * number, [1.0], [1.0])
    loads = served_method("plain", None, prompts, texts, None).throughput
    assert {each.requests: each.tokens_per_second for each in loads} == speeds
