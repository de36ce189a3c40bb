"""vLLM as a server: its flags, its start and end, and loads in turn."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.errors import EnvironmentFault
from pipeline.targets import vllm_server
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_server import LoadTask, flags, serving


def test_loads_take_turns_and_the_pass_of_median_length_counts(tiny_target, monkeypatch):
    """Other work disturbs a while: here all loads of the second turn, which none of them is judged
    by.
    """
    asked, told = [], []

    async def benchmark(address, requests, level, eos):
        asked.append((level, len(requests)))
        turn = (len(asked) - 1) // 2
        return {"requests": level, "seconds": (2.0, 90.0, 2.0 + level)[turn]}

    monkeypatch.setattr(vllm_server, "import_vllm", lambda: None)
    monkeypatch.setattr(vllm_server, "serving", lambda *_: contextlib.nullcontext("http://nowhere"))
    monkeypatch.setattr(vllm_server, "_benchmark", benchmark)
    spec = TargetSpec(str(tiny_target))
    task = LoadTask(spec, [[1, 2], [3]], 9, [1, 4], repeats=3)
    rows = vllm_server.measure(
        task, lambda **progress: told.append((progress.get("done"), progress.get("total")))
    )
    assert asked == [(1, 2), (4, 8)] * 3
    assert rows == [{"requests": 1, "seconds": 3.0}, {"requests": 4, "seconds": 6.0}]
    assert told == [(None, None), *((done, 6) for done in range(6))]


def test_engine_arguments_are_flags_of_the_server():
    arguments = {
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "revision": None,
        "max_model_len": 64,
    }
    config = {"method": "eagle", "num_speculative_tokens": 3}
    found = flags({**arguments, "speculative_config": config})
    assert found[:4] == ["--enforce-eager", "--no-enable-prefix-caching", "--max-model-len", "64"]
    assert found[4] == "--speculative-config" and json.loads(found[5]) == config and len(found) == 6


STAND_IN = """#!{python}
import http.server, pathlib, sys
arguments = sys.argv
if "{fails}":
    sys.exit("a line before\\n{fails}")
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *words):
        pass
pathlib.Path("{arguments}").write_text("\\n".join(arguments))
http.server.HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Healthy).serve_forever()
"""  # noqa: E501


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in the server's place, which writes its arguments down, or fails with these
    words.
    """

    def write(fails=""):
        program = tmp_path / "server"
        program.write_text(
            STAND_IN.format(python=sys.executable, fails=fails, arguments=tmp_path / "arguments")
        )
        program.chmod(0o700)
        monkeypatch.setattr(vllm_server, "sys", SimpleNamespace(executable=str(program)))
        monkeypatch.setattr(
            vllm_server, "STOPS_WITHIN", 0.2
        )  # this one does not hear that its caller has left
        return tmp_path / "arguments"

    return write


def test_the_server_answers_on_the_loopback_and_has_ended_with_the_block(tiny_target, stand_in):
    written = stand_in()
    with serving(
        TargetSpec(str(tiny_target)), {"speculative_config": {"method": "medusa"}}, 0
    ) as address:
        assert address.startswith("http://127.0.0.1:") and vllm_server.answers(address)
        arguments = written.read_text().splitlines()
        assert str(tiny_target) in arguments and "--speculative-config" in arguments
        assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert not vllm_server.answers(address)


def test_a_server_that_cannot_start_says_its_last_line(tiny_target, stand_in):
    stand_in(fails="no memory is left")
    refused = pytest.raises(EnvironmentFault, match=r"status 1: no memory is left.*check\.studies")
    with refused, serving(TargetSpec(str(tiny_target)), {}, 0):
        pass


def test_a_server_that_never_answers_is_ended(tiny_target, stand_in, monkeypatch):
    stand_in()
    monkeypatch.setattr(vllm_server, "STARTS_WITHIN", 0.2)
    monkeypatch.setattr(vllm_server, "answers", lambda address: False)
    refused = pytest.raises(EnvironmentFault, match="has not answered within 0 minutes: no output")
    with refused, serving(TargetSpec(str(tiny_target)), {}, 0):
        pass


@pytest.mark.slow
def test_the_server_ends_when_whoever_started_it_is_gone(tmp_path):
    """Killed, so that nothing of it can tell the server; here a module that sleeps stands for
    vLLM's.
    """
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(60)")
    code = f"""
import pipeline.targets.vllm_server as server, runpy, threading, sys
sys.path.insert(0, {str(tmp_path)!r})
threading.Thread(target=server._end_with_the_caller, daemon=True).start()
runpy.run_module("sleeps", run_name="__main__", alter_sys=True)
"""
    starts = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {code!r}],"
        " stdin=subprocess.PIPE, "
    )
    starts += "start_new_session=True); print(flush=True); time.sleep(60)"
    caller = subprocess.Popen(
        [sys.executable, "-c", starts], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    )
    assert caller.stdout
    caller.stdout.readline()
    (server,) = children(caller.pid)
    time.sleep(0.5)
    assert Path(f"/proc/{server}").exists()
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 30
    while is_running(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(server)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
