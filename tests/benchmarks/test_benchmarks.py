"""The benchmarks run, and say what they measured: at tiny sizes, where the figures mean nothing."""

from __future__ import annotations

import importlib
import json
import math
import os
import tempfile

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.arithmetic import backbone_flops, training_flops
from benchmarks.claims import Claim, Result, rates, ratio, speed_ratio
from benchmarks.results import write_index, write_result
from benchmarks.run import BENCHMARKS
from pipeline.heads.medusa import MedusaHeads
from pipeline.heads.shapes import MedusaShape
from tests.forks import serve_forks
from tests.heads.plain_loss import plain_summed_cross_entropy

ON_VLLM = "generate"


@pytest.fixture(scope="module")
def tiny_result(tmp_path_factory):
    """A function that runs a benchmark at a tiny size, once, and returns its result.

    Its processes come from the tests' own server. It leaves no temporary files behind.
    """
    found: dict[str, Result] = {}
    serve_forks()

    def measure(name: str) -> Result:
        if name in found:
            return found[name]
        threads = torch.get_num_threads()
        untrained = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as place:
            patched.setattr("tempfile.tempdir", place)
            patched.setattr("benchmarks.targets.DEMO_TARGET", untrained)
            found[name] = importlib.import_module(f"benchmarks.{name}").measure(tiny=True)
            assert os.listdir(place) == []
        torch.set_num_threads(threads)
        return found[name]

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in BENCHMARKS if name != ON_VLLM])
def test_every_benchmark_runs_on_a_cpu_at_a_tiny_size(name, tiny_result):
    assert_measured(tiny_result(name))


@pytest.mark.slow
def test_the_benchmark_of_vllm_runs_at_a_tiny_size(vllm_here, tiny_result):
    pytest.importorskip("vllm")
    assert_measured(tiny_result(ON_VLLM))


def assert_measured(result: Result) -> None:
    assert result.claims
    for claim in result.claims:
        assert math.isfinite(claim.measured)
        assert claim.measured > 0 or claim.unit == "MB"  # memory may not grow at all
    json.dumps(result.facts)


@pytest.mark.slow
def test_training_from_the_cache_and_online_learn_the_same(tiny_result):
    cases = tiny_result("train").facts["cases"]
    assert all(case["largest_loss_difference"] < 1e-4 for case in cases)


@pytest.mark.slow
def test_attention_in_blocks_gives_the_loss_of_full_masks(tiny_result):
    gaps = tiny_result("attention").facts["relative_loss_difference"]
    assert max(gaps.values()) < 1e-5


def test_a_ratio_is_of_medians_and_its_spread_of_rounds():
    seconds = {"ours": [1.0, 2.0, 4.0], "theirs": [3.0, 4.0, 6.0]}
    claim = speed_ratio("x", seconds, 12, "tokens", aim=3)
    assert (claim.measured, claim.spread, claim.met) == (2.0, (1.5, 3.0), False)
    assert claim.sides == {"ours, tokens/s": 6.0, "theirs, tokens/s": 3.0}
    percent = ratio("x", rates(1, [2.0]), rates(1, [1.0]), {}, unit="%", aim=50)
    assert (percent.measured, percent.met) == (50.0, True)
    assert Claim("size", 1.03, aim=1.02, at_most=True).met is False


def test_the_index_lists_the_files_the_missed_aims_and_what_is_not_measured(tmp_path):
    (tmp_path / "README.md").write_text("before\n<!-- results -->\nold\n<!-- /results -->\nafter\n")
    claims = [Claim("a claim", 0.5, aim=0.85), Claim("another", 2.0, aim=1.0)]
    write_result(tmp_path, "one", Result(claims, {}, ["a third"]), 1.0, peak_memory_gb=0.5)
    chat = Result([Claim("a figure", 12.0, unit="MB/s")])
    write_result(tmp_path, "one-chat", chat, seconds=1.0, peak_memory_gb=0.5)
    write_index(tmp_path, {"one": "speed", "two": "needs a GPU"})
    lines = (tmp_path / "README.md").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "after") and "old" not in lines
    assert [line.split(" | ")[:3] for line in lines[4:7]] == [
        ["| [one.json](one.json)", "speed", "1 of 2; not measured: a third"],
        ["| [one-chat.json](one-chat.json)", "speed", "no aim"],
        ["| –", "needs a GPU", "not measured"],
    ]
    assert "| one | a claim | 0.500× | ≥ 0.85× |" in lines


def test_the_backbones_operations_are_those_that_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    shape = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, **heads, attn_implementation="eager")).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(input_ids=torch.zeros(2, 40, dtype=torch.long), use_cache=False)
    masked_half = 2 * 3 * 2 * 64 * 40**2  # torch counts it too: 2 D T² in each layer of each row
    assert backbone_flops(model, [40, 40]) == counter.get_total_flops() - masked_half


@pytest.mark.parametrize("lm_head", ["untied", "shared", "tied"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_trainings_operations_are_those_that_torch_counts(lm_head, num_layers):
    from torch.utils.flop_counter import FlopCounterMode

    config = MedusaShape(24, 40, 3, num_layers, lm_head)
    heads = MedusaHeads(config)
    hidden_ND, labels_KN = torch.randn(10, 24), torch.randint(0, 40, (3, 10))
    with FlopCounterMode(display=False) as counter:
        plain_summed_cross_entropy(
            heads.hidden(hidden_ND), heads.lm_head, labels_KN
        ).sum().backward()
    assert training_flops(config, 10, 30) == counter.get_total_flops()
