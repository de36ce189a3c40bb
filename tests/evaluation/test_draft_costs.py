"""The number of draft tokens follows the engine's own time per step, which is timed at both ends of a straight line."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import ClassVar

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
from pipeline.targets.vllm_step_times import NUM_NEW_TOKENS, StepTime

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

    def step_times(target, engine_args, prompts, *, gpus, told):
        configs = [chosen.get("speculative_config") for chosen in engine_args]
        layouts = [config and read_layout(config["model"]) for config in configs]
        found.update(target=target, configs=configs, layouts=layouts, prompts=prompts, gpus=gpus)
        if found.get("fails"):
            raise EnvironmentFault("vLLM cannot start.", "vllm", "Do without.")
        return [StepTime(0.002, 0.0), StepTime(0.003, 0.02), StepTime(0.005, 0.01)]

    monkeypatch.setattr(module, "step_times", step_times)
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
    assert costs == StepCosts(0.002, {1: 0.003, 3: 0.005}, spread=0.02, settled=True)
    plain, *configs = found["configs"]
    assert plain is None and [config["num_speculative_tokens"] for config in configs] == [1, 3]
    assert {config["method"] for config in configs} == {"medusa"} and found["layouts"][1].shape.num_heads == 3
    assert not (tmp_path / "timed").exists()


def test_prompts_leave_room_for_what_is_timed_and_keep_their_end(asked):
    ask, found = asked
    ask([list(range(200, 290)) * 9])
    (ids,) = found["prompts"]
    assert ids[-1] == 289 and len(ids) + NUM_NEW_TOKENS + 2 * 3 == context_length(found["target"])


def test_an_engine_that_fails_leaves_nothing_behind(asked, tmp_path):
    ask, found = asked
    found["fails"] = True
    with pytest.raises(EnvironmentFault):
        ask([[5, 6]])
    assert not (tmp_path / "timed").exists()


def test_a_file_that_the_engine_still_holds_costs_no_time_that_was_taken(asked, tmp_path, monkeypatch):
    """As on NFS, where it leaves a file of another name."""

    def remove(directory):
        if directory.exists():
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(directory))

    ask, _ = asked
    monkeypatch.setattr(module, "remove", remove)
    assert ask([[5, 6]]).spread == 0.02 and (tmp_path / "timed").exists()


def test_without_vllm_there_is_nothing_to_ask(asked, monkeypatch):
    ask, found = asked
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    assert ask([[5, 6]]) is None and not found


class Engine:
    """Answers as many tokens as asked, so many per step, on a machine whose clock other work moves on."""

    speeds: ClassVar[dict[int, float]] = {}  # by threads

    def __init__(self, machine, per_step, seconds):
        self.machine, self.per_step, self.seconds = machine, per_step, seconds
        self.num_threads, self.threads = 4, 4
        self.llm = self.llm_engine = self
        self.left = self.num_steps = 0

    def add_request(self, name, prompt, params):
        self.left, self.num_steps = params.max_tokens, 0

    def has_unfinished_requests(self):
        return self.left > 0

    def step(self):
        is_prefill = self.num_steps == 0  # which is long
        self.machine.work(0.3 if is_prefill else self.seconds / self.speeds.get(self.threads, 1.0))
        self.left -= 1 if is_prefill else self.per_step
        self.num_steps += 1
        return ["tokens"]

    def set_num_threads(self, number):
        self.threads = number

    def close(self):
        pass


class Machine:
    """A core that other work takes for `slice` seconds, after gaps drawn with the mean `gap`, while it is busy."""

    def __init__(self, seed, gap, slice, busy=lambda now: True):
        self.now, self.gap, self.slice, self.busy = 0.0, gap, slice, busy
        self.draws = np.random.default_rng(seed)
        self.until = self.draws.exponential(gap) if gap else np.inf

    def work(self, seconds):
        while seconds > self.until:
            seconds -= self.until
            self.now += self.until + (self.slice if self.busy(self.now) else 0.0)
            self.until = self.draws.exponential(self.gap)
        self.until -= seconds
        self.now += seconds


@pytest.fixture
def timed(monkeypatch):
    """The times of a step of engines, each given by its tokens per step and their seconds, on a machine."""

    def measure(machine, *engines, prompts=([5], [6], [7])):
        started = iter([Engine(machine, *each) for each in engines])
        monkeypatch.setattr(vllm_step_times, "RunningEngine", lambda *arguments: next(started))
        monkeypatch.setattr(vllm_step_times, "perf_counter", lambda: machine.now)
        monkeypatch.setattr(vllm_step_times, "context_length", lambda spec: 100)
        params = lambda request, eos: SimpleNamespace(max_tokens=request.max_new_tokens)  # noqa: E731
        monkeypatch.setattr(vllm_step_times, "sampling_params", params)
        task = {"spec": {"model": "nowhere"}, "engines": [{}] * len(engines), "prompts": list(prompts), "gpus": 0}
        return [StepTime(**time) for time in vllm_step_times.measure(task, lambda **_: None)]

    return measure


@pytest.mark.slow
def test_a_step_is_timed_without_the_prefill(timed):
    found = timed(Machine(0, 0, 0), (1, 0.01), (4, 0.02))
    assert [time.seconds for time in found] == pytest.approx([0.01, 0.02])
    assert [time.spread for time in found] == pytest.approx([0, 0])


@pytest.mark.slow
def test_texts_without_a_step_are_not_timed(timed):
    """Prompts that leave room for the prefill's own token alone."""
    plain, drafting = StepTime(0.01, 0.0), *timed(Machine(0, 0, 0), (1, 0.01), prompts=[[5] * 99])
    assert not drafting.settled
    assert StepCosts.of_times(plain, {9: drafting}) is None
    assert StepCosts.of_times(drafting, {1: plain}) is None
    costs = StepCosts.of_times(plain, {1: plain, 9: drafting})
    assert costs.overheads(9) == {1: 1.0} and costs.settled
    assert StepTime.of_rounds([[0.3], [], [0.2, 0.4]]) == StepTime(0.2, pytest.approx(0.5))


RATES = {number: sum(0.9**depth for depth in range(number + 1)) for number in range(1, 10)}
PLAIN, SHORTEST, LONGEST = (1, 0.0026), (2, 0.0032), (4, 0.0120)  # tokens and seconds, plain, of 1 draft and of 9


def chosen(times):
    plain, shortest, longest = times
    return fastest(RATES, StepCosts.of_times(plain, {1: shortest, 9: longest}).overheads(9))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("gap", "slice", "busy"),
    [
        (0.006, 0.004, lambda now: True),  # another process beside every core
        (0.004, 0.004, lambda now: True),  # few long steps are undisturbed
        (0.002, 0.030, lambda now: now < 20),  # nothing is, in the first rounds
        (0.004, 0.012, lambda now: now % 6 < 4),  # work that comes and goes
    ],
)
def test_beside_other_work_as_many_tokens_are_drafted_as_on_a_quiet_machine(timed, gap, slice, busy, seed):
    quiet = chosen([StepTime(seconds, 0.0) for _, seconds in (PLAIN, SHORTEST, LONGEST)])
    assert chosen(timed(Machine(seed, gap, slice, busy), PLAIN, SHORTEST, LONGEST)) == quiet == 5


def test_engines_are_timed_until_two_rounds_agree_and_no_longer(timed):
    quiet, busy, never = Machine(0, 0, 0), Machine(0, 0.002, 0.03, lambda now: now < 20), Machine(0, 0.0002, 0.03)
    assert all(time.settled for time in timed(quiet, PLAIN, LONGEST)) and quiet.now < 10
    assert all(time.settled for time in timed(busy, PLAIN, LONGEST)) and 20 < busy.now < 40
    *_, time = timed(never, PLAIN, LONGEST)
    assert not time.settled and never.now > vllm_step_times.MAX_SECONDS


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [({1: 1.0, 2: 1.9, 4: 3.6}, 4), ({1: 1.0, 2: 1.1, 4: 0.8}, 2), ({1: 1.0, 2: 0.9, 4: 0.7}, 1), ({4: 1.0}, 4)],
)
def test_engines_on_a_cpu_use_as_many_threads_as_are_fastest(timed, monkeypatch, speeds, expected):
    def set_num_threads(engine, number):
        used.append(number)
        engine.threads = number

    used: list[int] = []
    monkeypatch.setattr(Engine, "speeds", {1: 0.1, 2: 0.1} | speeds)
    monkeypatch.setattr(Engine, "set_num_threads", set_num_threads)
    (time,) = timed(Machine(0, 0, 0), PLAIN)
    assert used[-1] == time.threads == expected
    assert StepCosts.of_times(time, {1: time}).to_json()["threads"] == expected
    assert min(used[:-1]) == max(1, expected // 2), "fewer than half of the fastest are not tried"


@pytest.mark.parametrize(("gpus", "processes"), [(0, [2]), (1, [1, 1])])
def test_engines_share_a_process_on_a_cpu_and_none_on_a_gpu(gpus, processes, monkeypatch):
    asked: list[int] = []

    def in_own_process(module, tasks, told, defaults):
        (task,) = tasks
        asked.append(len(task["engines"]))
        return [[{"seconds": float(chosen.get("number", 0)), "spread": 0.0} for chosen in task["engines"]]]

    monkeypatch.setattr(vllm_step_times, "in_own_process", in_own_process)
    target = TargetSpec("nowhere")
    times = vllm_step_times.step_times(target, [{}, {"number": 3}], [[5]], gpus=gpus)
    assert times == [StepTime(0.0, 0.0), StepTime(3.0, 0.0)]
    assert asked == processes
