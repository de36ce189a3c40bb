"""The figures of the native check, from decodings whose figures are known."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.checking.native import Pass, check_native, load_exported_heads, samples, speed, text_statistics
from pipeline.checking.prompts import Prompt, held_out_prompts
from pipeline.config import CheckConfig
from pipeline.errors import ConfigError
from pipeline.medusa.decoding import Decoded
from pipeline.storage.shards import read_rows
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


def decoded(accepted: list[int], seconds: float, first: float = 0.1) -> Decoded:
    return Decoded(list(range(1 + sum(accepted))), "length", accepted, first, seconds)


def test_rates_are_pooled_over_sequences_and_seconds_are_medians_over_repetitions():
    plain = [decoded([1] * 8, 0.8), decoded([1] * 4, 0.4)]  # 12 steps of 0.1 s
    first = [decoded([3, 1, 4], 0.5), decoded([2, 2], 0.5)]  # 12 tokens in 5 steps of 0.2 s
    slow = [decoded([3, 1, 4], 5.0), decoded([2, 2], 9.0, first=0.7)]
    found = speed([Pass(plain, first), Pass(plain, slow), Pass(plain, first)])
    assert found == {
        "acceleration_rate": pytest.approx(12 / 5),
        "overhead": pytest.approx(0.2 / 0.1),
        "speedup": pytest.approx(1.2),
        "tokens_per_second": pytest.approx(12.0),
        "baseline_tokens_per_second": pytest.approx(10.0),
        "time_to_first_token": pytest.approx(0.1),
    }


def test_a_sample_shows_each_token_once_with_the_step_that_gave_it(tiny_target):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    text = "the moon 月 sings"
    ids = tokenizer(text)["input_ids"]
    answer = Decoded(ids, "length", [2, len(ids) - 3], 0.1, 0.1)
    (sample,) = samples(tokenizer, [Prompt("a", tokenizer("why")["input_ids"])], [answer])
    assert sample["prompt"] == "why"
    assert "".join(token["text"] for token in sample["tokens"]) == text
    assert [token["step"] for token in sample["tokens"]] == [0, 1, 1, *[2] * (len(ids) - 3)]


def test_the_target_s_entropy_is_taken_where_it_chose_each_token(model, next_tokens):
    prompts = [Prompt(str(i), ids) for i, (ids, _) in enumerate(next_tokens[:3])]
    answers = [[5, 6, 7, 8, 5, 6, 7, 8], [9], [4, 4]]
    entropies = []
    with torch.inference_mode():
        for prompt, answer in zip(prompts, answers, strict=True):
            for end in range(len(answer)):
                p_V = model(torch.tensor([prompt.ids + answer[:end]])).logits[0, -1].double().softmax(-1)
                entropies.append(-(p_V * p_V.log()).sum().item())
    found = text_statistics(model, prompts, answers)
    assert found["mean_entropy_nats"] == pytest.approx(sum(entropies) / len(entropies), abs=1e-4)
    assert found["distinct_4"] == pytest.approx((4 / 5 + 1 + 1) / 3, abs=1e-4)


def test_held_out_prompts_are_the_check_rows_up_to_their_first_answer(finished_run):
    shards = finished_run.latest("generate").shards()
    rows = [row for path in shards for row in read_rows(path) if row["split"] == "check"]
    found = held_out_prompts(shards, 100, 10_000)
    assert [(prompt.id, prompt.ids) for prompt in found.kept] == [
        (row["id"], row["input_ids"][: row["spans"][0]["start"]]) for row in rows
    ]
    assert found.skipped == 0 and held_out_prompts(shards, 2, 10_000).kept == found.kept[:2]
    room = sorted(len(prompt.ids) for prompt in found.kept)[3]
    fitting = held_out_prompts(shards, 100, room)
    assert fitting.kept == [prompt for prompt in found.kept if len(prompt.ids) <= room]
    assert len(fitting.kept) + fitting.skipped == len(found.kept)


@pytest.fixture
def check(finished_run, tiny_target):
    def run(prompts: list[list[int]], **settings):
        named = [Prompt(str(number), ids) for number, ids in enumerate(prompts)]
        export = str(finished_run.path / "latest/export")
        usual = {"max_new_tokens": 12, "engines": ["native"]} | settings
        return check_native(TargetSpec(str(tiny_target)), export, named, CheckConfig(**usual), [(0,), (1,), (0, 0)], 0)

    return run


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


def test_heads_that_disagree_slow_it_down_and_change_no_token(check, next_tokens, finished_run, monkeypatch):
    from pipeline.checking import native

    def scrambled(export: str):
        heads = load_exported_heads(export)
        heads.lm_head.data = heads.lm_head.data.flip(1)
        return heads

    prompts = [ids for ids, token in next_tokens if token not in EOS][:4]
    plain = check(prompts)["samples"]
    monkeypatch.setattr(native, "load_exported_heads", scrambled)
    found = check(prompts)
    assert found["native"]["greedy_match"]["identical"] == 4 and found["native"]["acceleration_rate"] >= 1
    texts = [[token["text"] for token in sample["tokens"]] for sample in (*plain, *found["samples"])]
    assert texts[:2] == texts[2:]


@pytest.mark.parametrize(
    "settings",
    [
        {"acceptance": "typical"},
        {"acceptance": "typical", "first_token": "sampled"},
        {"acceptance": "nucleus", "top_p": 0.9},
        {"acceptance": "rejection", "top_p": 0.95},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_every_rule_is_timed_by_itself_and_greedy_text_is_compared_all_the_same(check, next_tokens, settings):
    prompts = [ids for ids, token in next_tokens if token not in EOS][:5]
    native = check(prompts, temperature=0.8, **settings)["native"]
    assert native["acceptance"] == settings["acceptance"] and native["temperature"] == 0.8
    assert native["greedy_match"] == {"sequences": 5, "identical": 5, "ties": 0}
    assert native["acceleration_rate"] >= 1
    if settings["acceptance"] == "rejection":
        assert native["sampled_identical"] == 5, "one seed writes one text, with and without the tree"
    else:
        assert "sampled_identical" not in native
