"""What vLLM leaves behind in a process, without vLLM: its CPU worker makes torch's way to set
threads a no-op.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from pipeline.targets import vllm_engine
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_engine import RunningEngine


@pytest.fixture
def engines(monkeypatch):
    """`engines()` starts one."""

    def start(**arguments):
        torch.set_num_threads = lambda number: None
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        core = SimpleNamespace(shutdown=lambda: None)
        return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "")  # so that it is put back whatever a test leaves
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.setattr(RunningEngine, "_num_open", 0)
    monkeypatch.setattr(torch, "set_num_threads", torch.set_num_threads)  # likewise
    for name in ("require_lm_head", "require_gpus"):
        monkeypatch.setattr(vllm_engine, name, lambda asked: None)
    monkeypatch.setattr(vllm_engine, "engine_arguments", lambda *asked: {})
    monkeypatch.setattr(vllm_engine, "import_vllm", lambda: SimpleNamespace(LLM=start))
    state = ModuleType("vllm.distributed.parallel_state")
    monkeypatch.setattr(state, "cleanup_dist_env_and_memory", lambda: None, raising=False)
    for name, module in (
        ("vllm", ModuleType("vllm")),
        ("vllm.distributed", ModuleType("d")),
        (state.__name__, state),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    return lambda: RunningEngine(TargetSpec("nowhere"), {}, 0)


def test_an_engine_that_does_not_end_well_leaves_the_process_as_it_was(engines):
    own, engine = torch.set_num_threads, engines()

    def fails():
        raise RuntimeError("the engine core is gone")

    engine.llm.llm_engine.engine_core.shutdown = fails
    with pytest.raises(RuntimeError, match="is gone"):
        engine.close()
    assert torch.set_num_threads == own and "LOCAL_WORLD_SIZE" not in os.environ


@pytest.mark.parametrize("first_closed", [0, 1])
def test_the_last_engine_leaves_the_process_as_it_was(engines, first_closed):
    own, running = torch.set_num_threads, [engines(), engines()]
    running.pop(first_closed).close()
    assert torch.set_num_threads is not own, "one still runs"
    running[0].close()
    assert torch.set_num_threads is own and "LOCAL_WORLD_SIZE" not in os.environ
