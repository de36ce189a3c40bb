"""vLLM's server: flags, start and end."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest

from pipeline.errors import EnvironmentFault
from pipeline.targets import vllm_server
from pipeline.targets.vllm_server import (
    LOOPBACK,
    Address,
    failure_reason,
    free_port,
    running_server,
    server_flags,
)
from tests.forks import has_ended


def test_engine_arguments_are_flags_of_the_server():
    config = {"method": "eagle", "num_speculative_tokens": 3}
    arguments = {"eager": True, "prefix_caching": False, "revision": None, "sizes": [1, 2]}
    *found, last = server_flags({**arguments, "speculative_config": config})
    assert found == ["--eager", "--no-prefix-caching", "--sizes", "1", "2", "--speculative-config"]
    assert json.loads(last) == config


STAND_IN = """#!{python}
import http.server, os, sys
arguments = sys.argv
assert os.path.basename(os.environ["VLLM_RPC_BASE_PATH"]).startswith("vllm-")
assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
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
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)


@pytest.mark.usefixtures("stand_in")
def test_a_server_answers_on_the_loopback_until_the_block_ends():
    address = Address(LOOPBACK, free_port())
    flags = ["--speculative-config", "{}"]
    with tempfile.TemporaryFile("w+") as log:
        with running_server(address, flags, log, "here", "Try again."):
            assert vllm_server.is_healthy(address.url)
        assert not vllm_server.is_healthy(address.url)
        with pytest.raises(EnvironmentFault, match="status 1: no drafts"):
            running_server(address, [], log, "here", "Try again.").__enter__()


def test_the_reason_of_a_failure_is_its_first_exception():
    output = """WARNING This can cause errors like `OSError: [Errno 24] Too many open files`. Raise
(Worker pid=7) ERROR [core.py:10] ValueError: Available memory (2 GiB) is less than requested.
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above."""
    assert failure_reason(output) == "Available memory (2 GiB) is less than requested"
    refused = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Your device does not support it. [type=value_error, input_value=ArgsKwargs]"""
    assert failure_reason(refused) == "Your device does not support it"
    usage = "usage: …\napi_server.py: error: unrecognized arguments: --wheels"
    assert failure_reason(usage) == "unrecognized arguments: --wheels"


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
