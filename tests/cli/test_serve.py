"""`serve`: an export in vLLM's real server, asked over HTTP, and what is refused before it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from pipeline.cli.serve import server_arguments
from pipeline.errors import ConfigError
from pipeline.targets.own_process import environment
from pipeline.targets.vllm_server import LOOPBACK, free_port
from tests.forks import has_ended

QUESTION = {"messages": [{"role": "user", "content": "w1 w2"}], "max_tokens": 8, "temperature": 0}


def ask(url: str, body: dict) -> bytes:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with closing(urllib.request.urlopen(request, timeout=60)) as answer:
        return answer.read()


def num_drafts(url: str) -> float:
    with closing(urllib.request.urlopen(f"{url}/metrics", timeout=60)) as page:
        found = re.search(
            r"^vllm:spec_decode_num_drafts_total\S* (\S+)$", page.read().decode(), re.M
        )
    return float(found[1])


@pytest.mark.slow
def test_an_export_is_served_and_asked_until_ctrl_c(finished_run):
    port = free_port()
    url = f"http://{LOOPBACK}:{port}"
    words = ["serve", str(finished_run.path), "--port", str(port), "--", "--max-num-seqs", "4"]
    command = subprocess.Popen(
        [sys.executable, "-m", "pipeline.cli", *words],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tempfile.gettempdir()),  # a socket's path has 107 characters at most
    )
    said = command.stderr.readline()
    assert said.startswith(f"{sys.executable} -m vllm.entrypoints.openai.api_server --model")
    assert "--max-num-seqs 4" in said
    ready = command.stderr.readline()
    assert f"{url}/v1" in ready, ready
    whole = json.loads(ask(url, QUESTION))["choices"][0]["message"]["content"]
    before = num_drafts(url)
    assert before > 0
    lines = ask(url, {**QUESTION, "stream": True}).decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    parts = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(parts) == whole and lines[-2] == "data: [DONE]"
    assert num_drafts(url) > before
    servers = children_of(command.pid)
    command.send_signal(signal.SIGINT)
    assert command.wait(20) == 130
    log = Path(re.search("log in (.+);", ready)[1])
    assert log.name.startswith("medusa-distill-serve-") and not log.exists()
    assert servers and all(has_ended(pid) for pid in servers)


def children_of(pid: int) -> list[int]:
    """The processes below a process, at any depth."""
    found = []
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True).stdout
    for child in map(int, listed.split()):
        found += [child, *children_of(child)]
    return found


def test_a_taken_port_is_refused(command, finished_run):
    with socket.socket() as other:
        other.bind((LOOPBACK, 0))
        other.listen()
        port = other.getsockname()[1]
        ended = command("serve", finished_run.path, "--port", port)
    assert ended.code == 4 and f"{LOOPBACK}:{port}" in ended.err and "choose another" in ended.err


def test_the_target_has_the_settings_of_its_run(copied_run, tmp_path):
    file = copied_run.path / "run.yaml"
    settings = yaml.safe_load(file.read_text())
    template = str(tmp_path / "chat.jinja")
    Path(template).write_text("{{ messages }}")
    own = {"chat_template": template, "dtype": "bfloat16", "quantization": "4bit", "max_tokens": 9}
    settings["target"] |= own
    file.write_text(yaml.safe_dump(settings))
    served = server_arguments(copied_run.path, None, {"dtype": "float32"}, gpus=0)
    assert served["chat_template"] == "{{ messages }}" and served["dtype"] == "float32"
    assert served["max_model_len"] > 9, "for training"
    assert served["served_model_name"] == Path(settings["target"]["model"]).name


def test_another_number_of_draft_tokens_names_target_and_heads(finished_run):
    with_heads = server_arguments(finished_run.path, None, {}, gpus=0)
    plain = server_arguments(finished_run.path, None, {}, gpus=0, plain=True)
    drafting = server_arguments(finished_run.path, None, {}, gpus=0, draft_tokens=2)
    assert drafting["model"] == plain["model"] != with_heads["model"]
    assert "speculative_config" not in plain
    assert drafting["speculative_config"] == {
        "method": "medusa",
        "model": with_heads["model"],
        "num_speculative_tokens": 2,
    }
    with pytest.raises(ConfigError, match="propose 3 tokens ahead, not 4"):
        server_arguments(finished_run.path, None, {}, gpus=0, draft_tokens=4)
    with pytest.raises(ConfigError, match="no effect with --plain"):
        server_arguments(finished_run.path, None, {}, gpus=0, plain=True, draft_tokens=2)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["check.repeats=2"], 2, "does not accept 'check.repeats=2'"),
        (["target.quantization=4bit"], 2, "vLLM cannot load a target in 4bit"),
    ],
)
def test_a_setting_that_cannot_be_served_is_refused(command, finished_run, words, code, says):
    ended = command("serve", finished_run.path, *words)
    assert ended.code == code and says in ended.err


def test_a_tuned_target_is_named_after_its_heads(finished_run, tmp_path):
    heads = tmp_path / "my-heads"
    shutil.copytree(finished_run.latest("export").path, heads)
    target = Path(json.loads((heads / "config.json").read_text())["base_model_name_or_path"])
    shutil.copytree(target, heads / "backbone")
    assert server_arguments(heads, None, {}, gpus=0)["served_model_name"] == "my-heads"


@pytest.mark.parametrize("name", ["serve", "chat"])
def test_a_run_without_an_export_is_named(command, copied_run, name):
    (copied_run.path / "latest" / "export").unlink()
    ended = command(name, copied_run.path)
    assert ended.code == 2 and "This run has no export yet" in ended.err
    assert f"medusa-distill run {copied_run.path}" in ended.err and "run.yaml" not in ended.err


@pytest.mark.parametrize("name", ["serve", "chat"])
def test_a_source_without_heads_is_named(command, tiny_target, tmp_path, name):
    ended = command(name, tmp_path / "nowhere")
    assert ended.code == 2 and "There is no such directory" in ended.err
    assert "Give a run's directory, or an export." in ended.err
    ended = command(name, tiny_target)
    assert ended.code == 3 and "an export: it has no 'heads'" in ended.err
    assert "RUN_DIR/latest/export" in ended.err
