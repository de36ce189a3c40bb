"""Work in another interpreter: its progress reaches the caller, its errors too, and it does not
outlive the call.
"""

from __future__ import annotations

import json
import runpy
import sys

import pytest

from pipeline.errors import ConfigError, EnvironmentFault
from pipeline.targets import vllm_decode, vllm_load
from pipeline.targets.own_process import in_own_process

WORK = """
import os, pathlib, sys, time
from pipeline.errors import ConfigError
from pipeline.targets.own_process import work_off

def work(task, tell):
    pathlib.Path(task["pid"]).write_text(str(os.getpid()))
    tell(part="counting", done=1, total=3)
    tell(part="counting", done=2, total=3)  # too soon to be told
    if task["number"] == 13:
        raise ConfigError("Not this one.", "number", "Take another.")
    if task["number"] == 14:
        sys.exit("no memory is left")
    time.sleep(task["seconds"])
    return task["number"]

work_off(work, *sys.argv[1:])
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "some_work.py").write_text(WORK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*numbers, seconds=0.0, told=None):
        tasks = [
            {"number": number, "seconds": seconds, "pid": str(tmp_path / "pid")}
            for number in numbers
        ]
        return in_own_process("some_work", tasks, told)

    return run


def test_results_come_in_order_and_progress_meanwhile(work):
    seen = []
    assert work(3, 4, seconds=0.7, told=lambda **progress: seen.append(progress)) == [3, 4]
    assert seen and all(
        progress == {"part": "counting", "done": 1, "total": 3} for progress in seen
    )


VARIABLES = """
import os, sys
from pipeline.targets.own_process import work_off

work_off(lambda task, tell: [os.environ.get(name) for name in task["names"]], *sys.argv[1:])
"""


def test_a_default_variable_yields_to_the_caller_s_own(tmp_path, monkeypatch):
    (tmp_path / "variables.py").write_text(VARIABLES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SET_BY_CALLER", "caller")
    monkeypatch.delenv("SET_BY_NOBODY", raising=False)
    names = ["SET_BY_CALLER", "SET_BY_NOBODY"]
    defaults = dict.fromkeys(names, "default")
    found = in_own_process("variables", [{"names": names}], defaults=defaults)
    assert found == [["caller", "default"]]


def test_errors_come_back_as_they_are_and_a_silent_end_with_its_last_line(work):
    with pytest.raises(ConfigError, match="Not this one"):
        work(3, 13)
    with pytest.raises(EnvironmentFault, match="status 1: no memory is left"):
        work(14)


def test_an_interrupt_ends_the_other_process_too(work, tmp_path):
    def interrupt(**_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work(3, seconds=60, told=interrupt)
    pid = (tmp_path / "pid").read_text()
    with pytest.raises(FileNotFoundError):
        open(f"/proc/{pid}/stat").close()


@pytest.mark.parametrize(
    ("module", "task"),
    [
        (
            vllm_decode,
            {"prompts": [], "max_new_tokens": 1, "repeats": 1, "at_once": None, "engine_args": {}},
        ),
        (
            vllm_load,
            {"prompts": [], "max_new_tokens": 1, "repeats": 1, "levels": [1], "engine_args": {}},
        ),
    ],
)
def test_each_module_of_vllm_s_does_its_tasks_as_a_program_too(module, task, tmp_path, monkeypatch):
    task_file, result_file = tmp_path / "task.json", tmp_path / "result.json"
    task_file.write_text(json.dumps([{**task, "spec": {"model": str(tmp_path)}, "gpus": 0}]))
    monkeypatch.setattr(sys, "argv", ["", str(task_file), str(result_file)])
    monkeypatch.delitem(sys.modules, module.__name__)
    runpy.run_module(module.__name__, run_name="__main__")
    found = json.loads(result_file.read_text())
    assert found["error"] == "ConfigError" and str(tmp_path) in found["args"][0], (
        "its target has no configuration"
    )
