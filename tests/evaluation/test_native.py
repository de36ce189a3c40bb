"""The native check, on an export of a finished run."""

from __future__ import annotations

import math

import pytest
import torch

from pipeline.artifacts.check_result import Baseline
from pipeline.artifacts.seen_answers import TrainingText, training_text
from pipeline.config import CheckConfig
from pipeline.errors import ConfigError
from pipeline.evaluation import native
from pipeline.evaluation.measuring import measure_heads
from pipeline.evaluation.native import check_native
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.evaluation.speed import CannotDecode
from pipeline.export.directory import read_heads
from pipeline.targets.spec import TargetSpec

EOS = {1}


@pytest.fixture(scope="module")
def asked(model) -> tuple[list[list[int]], list[list[int]]]:
    """Random prompts whose greedy answers end at once, and others."""
    prompts = torch.randint(3, 300, (400, 6), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        chosen = model(prompts).logits[:, -1].argmax(-1).tolist()
    pairs = list(zip(prompts.tolist(), chosen, strict=True))
    ending = [ids for ids, token in pairs if token in EOS]
    return ending, [ids for ids, token in pairs if token not in EOS]


@pytest.fixture
def check(finished_run, tiny_target):
    def run(prompts: list[list[int]], trained: TrainingText | None = None, **settings):
        named = [Prompt(str(number), ids) for number, ids in enumerate(prompts)]
        export = str(finished_run.path / "latest/export")
        config = CheckConfig(**{"max_new_tokens": 12, "engines": ["native"]} | settings)
        tree = [(0,), (1,), (0, 0)]
        target = TargetSpec(str(tiny_target))
        return check_native(CheckRequest(target, export, named, config, tree, trained=trained))

    return run


@pytest.mark.slow
def test_answers_that_end_with_their_first_token_spoil_nothing(check, asked):
    ending, others = asked
    result, _ = check([*ending[:3], *others[:2]])
    found = result.native
    assert found.prompts == 5 and found.greedy_match.identical == 5
    assert math.isfinite(found.overhead)
    with pytest.raises(ConfigError, match="no step to measure"):
        check(ending[:3])


@pytest.mark.slow
def test_heads_that_disagree_slow_it_down_and_change_no_token(check, asked, monkeypatch):
    def scrambled(export: str, model):
        heads = read_heads(export, model)
        heads.lm_head.data = heads.lm_head.data.flip(1)
        return heads

    monkeypatch.setattr(native, "read_heads", scrambled)
    found, _ = check(asked[1][:4])
    assert found.native.greedy_match.identical == 4 and found.native.acceleration_rate >= 1


@pytest.mark.slow
def test_a_baseline_that_fails_is_named_and_spoils_no_other(check, asked, monkeypatch):
    make, calls = native.baseline, []

    def fragile(name, *arguments):
        decode = make(name, *arguments)

        def fails_at(ids, seed):
            calls.append(name)
            if name == "prompt-lookup" and calls.count(name) == 11:
                raise CannotDecode("its cache cannot be cropped")
            return decode(ids, seed)

        return fails_at

    monkeypatch.setattr(native, "baseline", fragile)
    baselines = ["prompt-lookup", "generate"]
    result, _ = check(asked[1][:5], repeats=2, baselines=baselines)
    found = result.native
    lookup, generate = found.baselines
    assert generate.name == "generate" and generate.greedy_match.identical == 5
    assert lookup == Baseline(name="prompt-lookup", failed="its cache cannot be cropped")
    assert calls.count("prompt-lookup") == 11, "it is not asked again"


@pytest.mark.slow
def test_another_rule_is_timed_and_greedy_text_is_compared_too(check, asked):
    result, _ = check(asked[1][:5], temperature=0.8, acceptance="rejection", top_p=0.95)
    found = result.native
    assert (found.acceptance, found.temperature) == ("rejection", 0.8)
    assert found.greedy_match.identical == 5 and found.acceleration_rate >= 1


@pytest.mark.slow
def test_retrieval_changes_no_token(check, asked, finished_run):
    trained = training_text(finished_run.latest("generate"))
    result, _ = check(asked[1][:5], trained, baselines=["retrieval"])
    (retrieval,) = result.native.baselines
    assert retrieval.greedy_match.identical == 5 and retrieval.acceleration_rate >= 1


def test_heads_without_a_run_have_the_same_limits(finished_run, tiny_target):
    too_long = CheckConfig(prompts=1, draft_tokens=[99])
    with pytest.raises(ConfigError, match="and 99 are asked for"):
        measure_heads(finished_run.latest("export").path, TargetSpec(str(tiny_target)), too_long)


def test_retrieval_without_a_run_is_refused_before_decoding(check, asked, monkeypatch):
    monkeypatch.setattr(native, "load_on_gpus", lambda *_: pytest.fail("loaded"))
    for name in ("native", "vllm"):
        settings = CheckConfig(prompts=1, engines=[name], baselines=["retrieval"])
        with pytest.raises(ConfigError, match="prompt-lookup or assistant"):
            measure_heads("nowhere", TargetSpec("nowhere"), settings)
    with pytest.raises(ConfigError, match="reads a run's training text"):
        check(asked[1][:2], baselines=["retrieval"])
