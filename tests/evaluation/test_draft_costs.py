"""The number of draft tokens follows the engine's own time per step, which is timed at both ends of a straight line."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.decoding.tree_search import fastest
from pipeline.errors import EnvironmentFault
from pipeline.evaluation import draft_costs as module
from pipeline.evaluation.draft_costs import StepCosts, draft_costs
from pipeline.export.layout import read_layout
from pipeline.targets import vllm_step_times
from pipeline.targets.spec import TargetSpec, context_length

MILLISECONDS = st.floats(0.1, 500)


@given(plain=MILLISECONDS, first=MILLISECONDS, more=st.floats(0, 50), most=st.integers(2, 20))
def test_each_further_token_costs_the_same_between_the_two_that_were_timed(plain, first, more, most):
    found = StepCosts(plain, {1: first, most: first + more * (most - 1)}).overheads(most)
    assert list(found) == list(range(1, most + 1))
    assert np.allclose([found[number] for number in found], (first + more * np.arange(most)) / plain)


@given(rates=st.lists(st.floats(1, 2), min_size=3, max_size=14), first=MILLISECONDS, more=st.floats(0, 100))
def test_no_other_number_is_faster_by_more_than_timing_noise(rates, first, more):
    expected = dict(enumerate(np.cumsum(rates), start=1))
    costs = StepCosts(1.0, {1: first, len(rates): first + more * (len(rates) - 1)}).overheads(len(rates))
    tokens_per_second = {number: rate / (first + more * (number - 1)) for number, rate in expected.items()}
    chosen = fastest(expected, costs)
    assert tokens_per_second[chosen] >= 0.95 * max(tokens_per_second.values()) * (1 - 1e-9)


def test_a_chain_that_was_timed_below_a_shorter_one_costs_as_much():
    assert StepCosts(1.0, {1: 3.0, 4: 2.0}).overheads(4) == {1: 3.0, 2: 3.0, 3: 3.0, 4: 3.0}


def test_kinds_that_can_draft_one_token_alone_are_timed_once():
    assert StepCosts(2.0, {1: 3.0}).overheads(1) == {1: 1.5}


@pytest.fixture
def asked(finished_run, tmp_path, monkeypatch):
    """What is asked of vLLM for a finished run's heads."""
    found: dict = {}

    def step_seconds(target, engine_args, prompts, *, gpus):
        configs = [chosen.get("speculative_config") for chosen in engine_args]
        layouts = [config and read_layout(config["model"]) for config in configs]
        found.update(target=target, configs=configs, layouts=layouts, prompts=prompts, gpus=gpus)
        if found.get("fails"):
            raise EnvironmentFault("vLLM cannot start.", "vllm", "Do without.")
        return [0.002, 0.003, 0.005]

    monkeypatch.setattr(module, "step_seconds", step_seconds)
    heads = finished_run.latest("train").path / "heads.safetensors"
    target = TargetSpec(
        yaml.safe_load((finished_run.path / "run.yaml").read_text())["target"]["model"], dtype="float32"
    )

    def ask(prompts):
        return draft_costs(target, str(heads), 3, prompts, str(tmp_path / "timed"), 0)

    return ask, found


def test_vllm_is_asked_plainly_and_with_the_shortest_and_the_longest_chain_of_these_heads(asked, tmp_path):
    ask, found = asked
    (tmp_path / "timed").mkdir()
    (tmp_path / "timed/left.safetensors").write_bytes(b"of a killed run")
    costs = ask([[5] * 4] * 9)
    assert costs == StepCosts(0.002, {1: 0.003, 3: 0.005})
    plain, *configs = found["configs"]
    assert plain is None and [config["num_speculative_tokens"] for config in configs] == [1, 3]
    assert {config["method"] for config in configs} == {"medusa"} and found["layouts"][1].shape.num_heads == 3
    assert not (tmp_path / "timed").exists()


def test_prompts_leave_room_for_what_is_timed_and_keep_their_end(asked):
    ask, found = asked
    ask([list(range(200, 290)) * 9])
    (ids,) = found["prompts"]
    assert ids[-1] == 289 and len(ids) + 3 < context_length(found["target"])


def test_an_engine_that_fails_leaves_nothing_behind(asked, tmp_path):
    ask, found = asked
    found["fails"] = True
    with pytest.raises(EnvironmentFault):
        ask([[5, 6]])
    assert not (tmp_path / "timed").exists()


def test_without_vllm_there_is_nothing_to_ask(asked, monkeypatch):
    ask, found = asked
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert ask([[5, 6]]) is None and not found


class Engine:
    """Answers as many tokens as asked, so many per step; a step takes 10 ms, or 90 ms while the machine is busy."""

    def __init__(self, clock, per_step, is_busy):
        self.clock, self.per_step, self.is_busy = clock, per_step, is_busy
        self.llm = self.llm_engine = self
        self.left = self.num_steps = 0

    def add_request(self, name, prompt, params):
        self.left, self.num_steps = params.max_tokens, 0

    def has_unfinished_requests(self):
        return self.left > 0

    def step(self):
        if self.num_steps == 0 and self.left:
            self.clock[0] += 5  # a prefill is long
        else:
            self.clock[0] += 0.09 if next(self.is_busy) else 0.01
        self.left -= 1 if self.num_steps == 0 else self.per_step
        self.num_steps += 1
        return ["tokens"]

    def close(self):
        pass


def test_a_step_is_timed_without_the_prefill_and_without_what_other_work_adds(monkeypatch):
    clock, busy = [0.0], itertools.cycle([True, True, True, False])
    engines = iter([Engine(clock, 1, busy), Engine(clock, 4, busy)])
    monkeypatch.setattr(vllm_step_times, "RunningEngine", lambda *arguments: next(engines))
    monkeypatch.setattr(vllm_step_times, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(vllm_step_times, "context_length", lambda spec: 100)
    monkeypatch.setattr(vllm_step_times, "sampling_params", lambda request, eos: SimpleNamespace(max_tokens=33))
    spec = {"model": "nowhere"}

    def told(**_):
        pass

    found = vllm_step_times.measure({"spec": spec, "engines": [{}, {}], "prompts": [[5], [6]], "gpus": 0}, told)
    assert found == pytest.approx([0.01, 0.01])


@pytest.mark.parametrize(("gpus", "processes"), [(0, [2]), (1, [1, 1])])
def test_engines_share_a_process_on_a_cpu_and_none_on_a_gpu(gpus, processes, monkeypatch):
    asked: list[int] = []

    def in_own_process(module, tasks):
        (task,) = tasks
        asked.append(len(task["engines"]))
        return [[float(chosen.get("number", 0)) for chosen in task["engines"]]]

    monkeypatch.setattr(vllm_step_times, "in_own_process", in_own_process)
    target = TargetSpec("nowhere")
    assert vllm_step_times.step_seconds(target, [{}, {"number": 3}], [[5]], gpus=gpus) == [0, 3]
    assert asked == processes
