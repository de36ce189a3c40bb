"""The figures of the native check, from decodings whose figures are known."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.artifacts.json_form import to_json
from pipeline.config import CheckConfig
from pipeline.errors import ConfigError
from pipeline.evaluation.answers import mean_log_likelihood, text_statistics
from pipeline.evaluation.native import check_native
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.evaluation.speed import CannotDecode
from pipeline.export.directory import read_heads
from pipeline.targets.spec import TargetSpec

EOS = {1, *range(100, 108)}


@pytest.fixture(scope="module")
def model(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def next_tokens(model) -> list[tuple[list[int], int]]:
    """Random prompts with the target's greedy next token."""
    prompts = torch.randint(3, 300, (400, 6), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        chosen = model(prompts).logits[:, -1].argmax(-1)
    return list(zip(prompts.tolist(), chosen.tolist(), strict=True))


def test_the_target_s_entropy_is_taken_where_it_chose_each_token(model, next_tokens):
    prompts = [Prompt(str(i), ids) for i, (ids, _) in enumerate(next_tokens[:3])]
    answers = [[5, 6, 7, 8, 5, 6, 7, 8], [9], [4, 4]]
    entropies = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            for end in range(len(answer)):
                p_V = (
                    model(torch.tensor([prompt.ids + answer[:end]]))
                    .logits[0, -1]
                    .double()
                    .softmax(-1)
                )
                entropies.append(-(p_V * p_V.log()).sum().item())
    found = text_statistics(model, prompts, answers)
    assert found.mean_entropy_nats == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
    assert found.distinct_4 == pytest.approx((4 / 5 + 1 + 1) / 3, abs=1e-4)


def test_likelihood_is_per_token_under_the_target_at_temperature_1(model, next_tokens):
    prompts = [Prompt(str(i), ids) for i, (ids, _) in enumerate(next_tokens[:2])]
    answers = [[5, 6, 7], [9]]
    each = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            for end, token in enumerate(answer):
                p_V = (
                    model(torch.tensor([prompt.ids + answer[:end]]))
                    .logits[0, -1]
                    .double()
                    .softmax(-1)
                )
                each.append(p_V[token].log().item())
    assert mean_log_likelihood(model, prompts, answers) == pytest.approx(sum(each) / 4, abs=1e-4)


@pytest.fixture
def check(finished_run, tiny_target):
    def run(prompts: list[list[int]], **settings):
        named = [Prompt(str(number), ids) for number, ids in enumerate(prompts)]
        export = str(finished_run.path / "latest/export")
        usual = {"max_new_tokens": 12, "engines": ["native"]} | settings
        choices = [(0,), (1,), (0, 0)]
        result, answers = check_native(
            CheckRequest(TargetSpec(str(tiny_target)), export, named, CheckConfig(**usual), choices)
        )
        return {**to_json(result), "answers": answers}

    return run


@pytest.mark.slow
def test_answers_that_end_with_their_first_token_take_no_step_and_spoil_nothing(check, next_tokens):
    ending = [ids for ids, token in next_tokens if token in EOS]
    going_on = [ids for ids, token in next_tokens if token not in EOS]
    assert len(ending) >= 3
    native = check([*ending[:3], *going_on[:2]])["native"]
    assert native["prompts"] == 5 and native["greedy_match"]["identical"] == 5
    assert sum(native["accepted_lengths"]) > 0 and math.isfinite(native["overhead"])
    with pytest.raises(ConfigError, match="no step to measure"):
        check(ending[:3])


def test_one_new_token_leaves_nothing_to_measure(check, next_tokens):
    with pytest.raises(ConfigError, match=r"check\.max_new_tokens"):
        check([ids for ids, _ in next_tokens[:2]], max_new_tokens=1)


@pytest.mark.slow
def test_heads_that_disagree_slow_it_down_and_change_no_token(
    check, next_tokens, finished_run, monkeypatch
):
    from pipeline.evaluation import native

    def scrambled(export: str, model):
        heads = read_heads(export, model)
        heads.lm_head.data = heads.lm_head.data.flip(1)
        return heads

    prompts = [ids for ids, token in next_tokens if token not in EOS][:4]
    plain = check(prompts)["samples"]
    monkeypatch.setattr(native, "read_heads", scrambled)
    found = check(prompts)
    assert (
        found["native"]["greedy_match"]["identical"] == 4
        and found["native"]["acceleration_rate"] >= 1
    )
    texts = [
        [token["text"] for token in sample["tokens"]] for sample in (*plain, *found["samples"])
    ]
    assert texts[:2] == texts[2:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [1, 5, 11], ids=["in its warm-up", "half-way", "in the second repetition"]
)
@pytest.mark.parametrize(
    "rule", [{}, {"acceptance": "typical", "temperature": 0.8}], ids=["greedy", "typical"]
)
def test_a_baseline_that_fails_is_named_and_spoils_nothing_for_the_others(
    check, next_tokens, monkeypatch, asked, rule
):
    from pipeline.evaluation import native

    make, calls = native.baseline, []
    last = min(asked, 5) if rule else asked  # beside another rule greedy text is written once

    def fragile(name, *arguments):
        decode = make(name, *arguments)

        def fails_at(ids, seed):
            calls.append(name)
            if name == "prompt-lookup" and calls.count(name) == last:
                raise CannotDecode("its cache cannot be cropped")
            return decode(ids, seed)

        return fails_at

    monkeypatch.setattr(native, "baseline", fragile)
    prompts = [ids for ids, token in next_tokens if token not in EOS][:5]
    found = check(prompts, repeats=2, baselines=["prompt-lookup", "generate"], **rule)
    native_part = found["native"]
    assert native_part["greedy_match"] == {"sequences": 5, "identical": 5, "ties": 0}
    assert len(found["answers"]["plain"]) == len(found["answers"]["medusa"]) == 5
    generate, lookup = native_part["baselines"]
    assert generate["name"] == "generate" and generate["greedy_match"]["identical"] == 5
    assert lookup == {"name": "prompt-lookup", "failed": "its cache cannot be cropped"}
    assert calls.count("prompt-lookup") == last, "it is not asked again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"acceptance": "typical"},
        {"acceptance": "typical", "first_token": "sampled"},
        {"acceptance": "rejection", "top_p": 0.95},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_rule_is_timed_by_itself_and_greedy_text_is_compared_all_the_same(
    check, next_tokens, settings
):
    prompts = [ids for ids, token in next_tokens if token not in EOS][:5]
    native = check(prompts, temperature=0.8, **settings)["native"]
    assert native["acceptance"] == settings["acceptance"] and native["temperature"] == 0.8
    assert native["greedy_match"] == {"sequences": 5, "identical": 5, "ties": 0}
    assert native["acceleration_rate"] >= 1
    if settings["acceptance"] == "rejection":
        assert native["sampled_identical"] == 5, (
            "one seed writes one text, with and without the tree"
        )
    else:
        assert "sampled_identical" not in native
