"""Seconds of a step in vLLM, plain and with draft tokens: `calibrate.draft_tokens: auto` weighs acceptance by them.

One request at a time, from one output of the engine to the next, without the prefill. Other work on the machine only
adds time, to long steps more often than to short ones, and comes and goes. So engines take turns, a prompt each round;
a round's time is that of its fastest step, an engine's that of its fastest round, and rounds are repeated until the two
fastest of every engine agree, up to a bound. On a CPU all engines live in one process and use as many threads
as plain steps are fastest with; on a GPU each has a process of its own, whose end frees the memory.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

from pipeline.conversations.requests import Request
from pipeline.targets.own_process import Tell, in_own_process, work_off
from pipeline.targets.spec import TargetSpec, context_length
from pipeline.targets.vllm_engine import RunningEngine, sampling_params

NUM_NEW_TOKENS = 64
AGREEMENT = 0.05  # of an engine's two fastest rounds
MIN_ROUNDS, MAX_ROUNDS, MAX_SECONDS = 4, 24, 60.0  # of all engines of a process; the time bounds further rounds
NUM_TRIED, SLOWER = 16, 1.5  # tokens per number of threads; over the fastest, where no fewer threads are tried
# OpenMP's threads wait for each other hundreds of times a step, spinning by default. One that the system has put aside
# for other work then stops them all. (The demo's steps of 2.4, 3.0 and 3.9 ms took 11, 12 and 17 beside one busy core.)
WAITING = {"OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True)
class StepTime:
    """Seconds of an engine's step, and how much more its second fastest round took, as a share."""

    seconds: float  # infinite where no two rounds had a step: all was written by the prefill and one step after it
    spread: float
    threads: int | None = None  # of the CPU, that steps used; None on a GPU

    @classmethod
    def of_rounds(cls, rounds: Sequence[Sequence[float]], threads: int | None = None) -> StepTime:
        """Of the steps' times of several rounds."""
        fastest, second, *_ = [*sorted(min(steps) for steps in rounds if steps), math.inf, math.inf]
        if math.isinf(second):
            return cls(math.inf, math.inf, threads)
        return cls(fastest, second / fastest - 1, threads)

    @property
    def settled(self) -> bool:
        """Whether two rounds have agreed on it."""
        return self.spread <= AGREEMENT


def step_times(
    spec: TargetSpec,
    engine_args: Sequence[Mapping[str, Any]],
    prompts: Sequence[Sequence[int]],
    *,
    gpus: int = 0,
    told: Tell | None = None,
) -> list[StepTime]:
    """The time of a step for each set of engine arguments; an empty one is plain decoding.

    Prompts must leave room in the context; the first is also the warm-up. `told` is called with how far it has come.

    Raises:
        ConfigError, EnvironmentFault: As VLLMGenerationEngine does, and EnvironmentFault where an engine dies.
    """
    task = {"spec": asdict(spec), "prompts": [list(ids) for ids in prompts], "gpus": gpus}
    together = [[dict(chosen)] for chosen in engine_args] if gpus else [[dict(chosen) for chosen in engine_args]]
    found = [in_own_process(__name__, [{**task, "engines": engines}], told, WAITING) for engines in together]
    return [StepTime(**time) for (times,) in found for time in times]


def measure(task: Mapping[str, Any], tell: Tell) -> list[dict[str, Any]]:
    """The times of a step of engines that take turns in this process."""
    ours: dict[str, Any] = {"enable_prefix_caching": False, "max_num_seqs": 1}
    spec, prompts = TargetSpec(**task["spec"]), task["prompts"]
    room = context_length(spec)
    engines = [RunningEngine(spec, {**ours, **chosen}, task["gpus"]) for chosen in task["engines"]]
    threads = None if task["gpus"] else _use_fastest_threads(engines[0], prompts[0])
    found = _in_rounds([running.llm.llm_engine for running in engines], prompts, room, tell, threads)
    for running in reversed(engines):
        running.close()
    return [asdict(time) for time in found]


def _in_rounds(
    engines: Sequence[Any], prompts: Sequence[list[int]], room: int, tell: Tell, threads: int | None
) -> list[StepTime]:
    """The time of each engine's step; a prompt per round, after one that is not counted."""
    rounds: list[list[list[float]]] = [[] for _ in engines]
    found: list[StepTime] = []
    started = perf_counter()
    for turn, ids in enumerate(itertools.islice(itertools.cycle(prompts), MAX_ROUNDS + 1)):
        tell(part="vLLM's steps timed", done=turn, total=0, unit="rounds", note="until two agree")
        for engine, taken in zip(engines, rounds, strict=True):
            taken.append(_steps(engine, ids, min(NUM_NEW_TOKENS, room - len(ids)), str(turn)))
        if turn < MIN_ROUNDS:
            continue
        found = [StepTime.of_rounds(taken[1:], threads) for taken in rounds]
        if all(time.settled for time in found) or perf_counter() - started > MAX_SECONDS:
            break
    return found


def _use_fastest_threads(running: RunningEngine, ids: list[int]) -> int:
    """Set the number of threads with this engine's fastest step, and return it.

    Tried are all, half of them, a quarter, … while steps get no slower.

    A small target's steps need no more than one, and with one they are hardly disturbed by other work.
    """
    most = best = running.num_threads
    fastest = math.inf
    _steps(running.llm.llm_engine, ids, NUM_TRIED, "first")  # is slow
    for threads in (most >> halvings for halvings in range(most.bit_length())):
        running.set_num_threads(threads)
        seconds = min(_steps(running.llm.llm_engine, ids, NUM_TRIED, f"{threads} threads"), default=math.inf)
        if seconds > SLOWER * fastest:
            break
        if seconds < fastest:
            best, fastest = threads, seconds
    running.set_num_threads(best)
    return best


def _steps(engine: Any, ids: list[int], num_tokens: int, name: str) -> list[float]:
    """The seconds of each step of a request after its prefill."""
    seconds = [later - earlier for earlier, later in pairwise(_outputs(engine, ids, num_tokens, name))]
    return seconds[:-1] or seconds  # a text's last step may be cut short


def _outputs(engine: Any, ids: list[int], num_tokens: int, name: str) -> Iterator[float]:
    """When each step's tokens of a request were there, the prefill's first, whatever it writes."""
    from vllm.sampling_params import RequestOutputKind

    params = sampling_params(Request(name, ids, num_tokens), eos=())
    params.output_kind = RequestOutputKind.DELTA
    engine.add_request(name, {"type": "token", "prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        if engine.step():
            yield perf_counter()


if __name__ == "__main__":
    work_off(measure, *sys.argv[1:])
