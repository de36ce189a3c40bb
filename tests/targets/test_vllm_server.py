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
from pipeline.targets.vllm_server import LoadTask, flags, serving


def test_loads_take_turns_and_the_median_pass_counts(random_target, monkeypatch):
    """Other work disturbs one turn: here all loads of the second, none of which counts."""
    asked, reports = [], []

    async def benchmark(address, requests, level, eos):
        asked.append((level, len(requests)))
        turn = (len(asked) - 1) // 2
        return {"requests": level, "seconds": (2.0, 90.0, 2.0 + level)[turn]}

    monkeypatch.setattr(vllm_server, "import_vllm", lambda: None)
    monkeypatch.setattr(vllm_server, "serving", lambda *_: contextlib.nullcontext("http://nowhere"))
    monkeypatch.setattr(vllm_server, "_benchmark", benchmark)
    task = LoadTask(random_target, [[1, 2], [3]], 9, [1, 4], repeats=3)
    rows = vllm_server.measure(task, lambda **progress: reports.append(progress))
    assert asked == [(1, 2), (4, 8)] * 3
    assert rows == [{"requests": 1, "seconds": 3.0}, {"requests": 4, "seconds": 6.0}]
    assert [(each["done"], each["total"]) for each in reports[1:]] == [
        (done, 6) for done in range(6)
    ]


def test_engine_arguments_are_flags_of_the_server():
    config = {"method": "eagle", "num_speculative_tokens": 3}
    arguments = {"eager": True, "prefix_caching": False, "revision": None, "max_len": 64}
    found = flags({**arguments, "speculative_config": config})
    assert found[:4] == ["--eager", "--no-prefix-caching", "--max-len", "64"]
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
    """A program in the server's place, which writes its arguments to a file, or fails."""

    def write(fails=""):
        program, arguments = tmp_path / "server", tmp_path / "arguments"
        values = {"python": sys.executable, "fails": fails, "arguments": arguments}
        program.write_text(STAND_IN.format(**values))
        program.chmod(0o700)
        monkeypatch.setattr(vllm_server, "sys", SimpleNamespace(executable=str(program)))
        # it does not end with its caller
        monkeypatch.setattr(vllm_server, "STOPS_WITHIN", 0.2)
        return arguments

    return write


def test_a_server_answers_on_the_loopback_until_the_block_ends(random_target, stand_in):
    written = stand_in()
    with serving(random_target, {"speculative_config": {"method": "medusa"}}, 0) as address:
        assert address.startswith("http://127.0.0.1:") and vllm_server.answers(address)
        arguments = written.read_text().splitlines()
        assert random_target.model in arguments and "--speculative-config" in arguments
        assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert not vllm_server.answers(address)


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("no memory is left", r"status 1: no memory is left.*check\.studies"),
        ("", "has not answered within 0 minutes: no output"),
    ],
)
def test_a_server_that_does_not_start_is_an_environment_fault(
    random_target, stand_in, monkeypatch, fails, words
):
    stand_in(fails)
    if not fails:
        monkeypatch.setattr(vllm_server, "STARTS_WITHIN", 0.2)
        monkeypatch.setattr(vllm_server, "answers", lambda address: False)
    with pytest.raises(EnvironmentFault, match=words), serving(random_target, {}, 0):
        pass


SERVER = """
import threading, time
import pipeline.targets.vllm_server as server
threading.Thread(target=server._end_with_the_caller, daemon=True).start()
time.sleep(60)
"""
CALLER = """
import subprocess, sys, time
server = subprocess.Popen(
    [sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True
)
print(server.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_the_server_ends_with_a_killed_caller():
    caller = subprocess.Popen([sys.executable, "-c", CALLER, SERVER], stdout=subprocess.PIPE)
    stat = Path(f"/proc/{int(caller.stdout.readline())}/stat")
    time.sleep(0.5)
    assert stat.exists()
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 30
    while is_running(stat) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(stat)


def is_running(stat):
    try:
        return stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
