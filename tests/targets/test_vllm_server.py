"""vLLM's server: flags, start, end, and load levels in turn."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from pipeline.errors import EnvironmentFault
from pipeline.targets import vllm_server
from pipeline.targets.vllm_server import LoadFigures, LoadTask, running_server, server_flags
from tests.forks import has_ended


def test_loads_take_turns_and_the_median_pass_counts(random_target, monkeypatch):
    """Other work disturbs the second pass, which does not count."""
    asked, reports = [], []

    async def benchmark(address, requests, level, eos):
        asked.append((level, len(requests)))
        turn = (len(asked) - 1) // 2
        return LoadFigures(level, (2.0, 90.0, 2.0 + level)[turn], 0, [], [], None)

    monkeypatch.setattr(vllm_server, "import_vllm", lambda: None)
    monkeypatch.setattr(vllm_server, "running_server", lambda *_: contextlib.nullcontext(""))
    monkeypatch.setattr(vllm_server, "_benchmark_server", benchmark)
    task = LoadTask(random_target, [[1, 2], [3]], 9, repeats=3, levels=[1, 4])
    rows = vllm_server.measure_server(task, lambda **progress: reports.append(progress))
    assert asked == [(1, 2), (4, 8)] * 3
    assert [(row.requests, row.seconds) for row in rows] == [(1, 3.0), (4, 6.0)]
    assert [each["done"] for each in reports[1:]] == [0, 1, 2, 3, 4, 5]


def test_engine_arguments_are_flags_of_the_server():
    config = {"method": "eagle", "num_speculative_tokens": 3}
    arguments = {"eager": True, "prefix_caching": False, "revision": None, "max_len": 64}
    found = server_flags({**arguments, "speculative_config": config})
    assert found[:4] == ["--eager", "--no-prefix-caching", "--max-len", "64"]
    assert found[4] == "--speculative-config" and json.loads(found[5]) == config and len(found) == 6


STAND_IN = """#!{python}
import http.server, sys
arguments = sys.argv
if "--speculative-config" not in arguments:
    sys.exit("a line before\\nno drafts")
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *words):
        pass
host, port = (arguments[arguments.index(flag) + 1] for flag in ("--host", "--port"))
assert host == "127.0.0.1"
http.server.HTTPServer((host, int(port)), Healthy).serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in the server's place that checks its flags and does not end with its caller."""
    program = tmp_path / "server"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o700)
    monkeypatch.setattr(vllm_server, "sys", SimpleNamespace(executable=str(program)))
    monkeypatch.setattr(vllm_server, "STOPS_WITHIN", 0.2)


@pytest.mark.usefixtures("stand_in")
def test_a_server_answers_on_the_loopback_until_the_block_ends(random_target):
    with running_server(random_target, {"speculative_config": {"method": "medusa"}}, 0) as address:
        assert vllm_server.is_healthy(address)
    assert not vllm_server.is_healthy(address)
    with pytest.raises(EnvironmentFault, match="status 1: no drafts"):
        running_server(random_target, {}, 0).__enter__()


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
    pid = int(caller.stdout.readline())
    time.sleep(0.5)
    assert not has_ended(pid)
    caller.kill()
    caller.wait()
    deadline = time.monotonic() + 30
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert has_ended(pid)
