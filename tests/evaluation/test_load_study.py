"""At which load heads stop paying: the study's rows from what the server's client measured, and
what is asked of it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.artifacts.check_result import LoadRow, Percentiles
from pipeline.artifacts.json_form import to_json
from pipeline.config import CheckConfig, LatencyLimits
from pipeline.errors import EnvironmentFault
from pipeline.evaluation import served as module
from pipeline.evaluation.prompts import CheckRequest, Prompt
from pipeline.evaluation.served import LEVELS, in_words, load_rows, load_study, stops_paying_at
from pipeline.report.documents import report_texts
from pipeline.targets import vllm_server
from pipeline.targets.spec import TargetSpec
from pipeline.targets.vllm_server import LoadTask, flags, serving


def measured(requests=1, seconds=2.0, num_tokens=100, ttft=(0.1,), tpot=(0.01,), rate=None):
    times = {"ttft": list(ttft), "tpot": list(tpot), "acceleration_rate": rate}
    return {"requests": requests, "seconds": seconds, "num_tokens": num_tokens} | times


def test_a_row_has_both_servers_speeds_and_their_waiting_times():
    hundred = [
        number / 1000 for number in range(101)
    ]  # 0 to 100 ms: percentile and value are the same
    (row,) = load_rows(
        [measured(8, seconds=4.0, num_tokens=100, ttft=hundred, tpot=[None, *hundred])],
        [measured(8, seconds=2.0, num_tokens=100, rate=3.1)],
        LatencyLimits(),
    )
    assert (row.requests, row.speedup, row.acceleration_rate) == (8, 2.0, 3.1)
    assert (row.baseline_tokens_per_second, row.tokens_per_second) == (25, 50)
    assert row.baseline_ttft_ms == row.baseline_tpot_ms == Percentiles(p50=50, p90=90, p99=99)
    assert row.within_slo is None, "there are no limits"


def test_a_request_keeps_the_limits_if_neither_is_broken():
    ttft, tpot = (
        (0.05, 0.05, 0.2, 0.05),
        (0.01, 0.03, 0.01, None),
    )  # the last is an answer of one token
    for limits, share in (
        (LatencyLimits(ttft_ms=100), 0.75),
        (LatencyLimits(tpot_ms=20), 0.75),
        (LatencyLimits(ttft_ms=100, tpot_ms=20), 0.5),
        (LatencyLimits(ttft_ms=1), 0.0),
    ):
        (row,) = load_rows([measured()], [measured(ttft=ttft, tpot=tpot)], limits)
        assert row.within_slo == share


@given(st.lists(st.floats(0.1, 3), min_size=1, max_size=7))
def test_heads_stop_paying_at_the_first_load_at_which_the_server_is_slower_with_them(speedups):
    rows = [
        LoadRow(requests=level, speedup=speedup)
        for level, speedup in zip(LEVELS, speedups, strict=False)
    ]
    stops, slower = stops_paying_at(rows), [row.requests for row in rows if row.speedup < 1]
    assert stops == min(slower, default=None)
    assert all(row.speedup >= 1 for row in rows if stops is None or row.requests < stops)
    named = [int(number) for number in re.findall("[0-9]+", in_words(rows))]
    assert set(slower) <= set(named), "each load at which they lose is named"


@pytest.mark.parametrize(
    ("speedups", "words"),
    [
        ((1.3, 1.2, 1.1), "pay up to 4 requests at once, the most that were tried."),
        ((1.3, 1.2, 1.1, 0.9, 0.8), "pay up to 4 requests at once; they are slower at 8 and 16."),
        (
            (1.3, 1.2, 0.9, 0.9, 0.8, 1.1),
            "up to 2 requests at once; they are slower at 4, 8 and 16, and faster again at 32.",
        ),
        (
            (0.9, 1.1, 1.2, 0.8),
            "the heads pay at 2 and 4 requests at once alone; they are slower at 1 and 8.",
        ),
        (
            (1.2, math.nan, 1.1),
            "pay up to 1 requests at once; they are slower at 2, and faster again at 4.",
        ),
        ((0.9, 0.8), "the heads do not pay; they are slower at 1 and 2."),
    ],
)
def test_a_single_faster_load_is_no_promise_for_those_below_it(speedups, words):
    rows = [
        LoadRow(requests=level, speedup=speedup)
        for level, speedup in zip(LEVELS, speedups, strict=False)
    ]
    assert in_words(rows).endswith(words)


def test_what_is_asked_of_the_servers_and_where_it_is_told(tiny_target, monkeypatch):
    def serve_under_load(
        target, engine_args, prompts, levels, max_new_tokens, *, repeats, gpus, told
    ):
        asked.update(
            engine_args=engine_args, prompts=prompts, max_new_tokens=max_new_tokens, repeats=repeats
        )
        return [
            [
                measured(level, seconds=1.0, num_tokens=100 - (level > 4) * 50 * with_heads)
                for level in levels
            ]
            for with_heads in (False, True)
        ]

    asked: dict = {}
    monkeypatch.setattr(module, "serve_under_load", serve_under_load)
    prompts = [Prompt("a", [1, 2]), Prompt("b", [3])]
    settings = CheckConfig(max_new_tokens=9, studies=["load"], slo={"ttft_ms": 200})
    config = {"method": "medusa", "model": "export", "num_speculative_tokens": 3}
    target = TargetSpec(str(tiny_target))
    found = load_study(CheckRequest(target, "export", prompts, settings, speculative_config=config))
    assert asked["engine_args"] == [{}, {"speculative_config": config}]
    assert (asked["prompts"], asked["max_new_tokens"], asked["repeats"]) == (
        [[1, 2], [3]],
        9,
        settings.repeats,
    )
    words = (
        "Served by vLLM, the heads pay up to 4 requests at once; they are slower at 8, 16, 32"
        " and 64."
    )
    assert [row.requests for row in found.rows] == [1, 2, 4, 8, 16, 32, 64]
    assert found.under_load == words
    texts = report_texts(
        {
            "check": {
                "vllm": {
                    "studies": {"load": [to_json(row) for row in found.rows]},
                    "under_load": words,
                }
            }
        },
        {},
    )
    said = ("Study: load", "slower at 8,", "100 / 100 / 100", "within limits")
    for name, text in texts.items():
        assert name.endswith(".json") or all(words in text for words in said), name
    assert any("study-load" in text for text in texts.values()), "the page has the plot"


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
    task = LoadTask(spec, {}, [[1, 2], [3]], [1, 4], max_new_tokens=9, repeats=3, gpus=0)
    rows = vllm_server.measure(
        task, lambda **progress: told.append((progress.get("done"), progress.get("total")))
    )
    assert asked == [(1, 2), (4, 8)] * 3
    assert rows == [{"requests": 1, "seconds": 3.0}, {"requests": 4, "seconds": 6.0}]
    assert told == [(None, None), *((done, 6) for done in range(6))]


def test_load_needs_the_engine_that_serves():
    with pytest.raises(ValueError, match="load needs vllm"):
        CheckConfig(studies=["load"], engines=["native"])


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
