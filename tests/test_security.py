"""No file of a stranger is run, no name in it becomes a path, and no secret is written."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
import yaml

from pipeline.errors import ConfigError
from pipeline.redact import redacted
from pipeline.storage.shards import read_rows
from tests.export.hub_stand_in import TOKEN, HubStandIn, push_to
from tests.flows.tiny import latest, read_lines, run_again, write_lines
from tests.forks import in_a_fork

pytest_plugins = ["tests.flows.failing"]

ROOT = Path(__file__).parent.parent


def test_no_module_loads_weights_or_arrays_that_hold_code():
    """Other ways to run a stranger's bytes are refused by ruff's rules S."""
    for file in (ROOT / "pipeline").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            call = ast.unparse(node) if isinstance(node, ast.Call) else ""
            assert not call.startswith("torch.load(") or "weights_only=True" in call, file
            assert "allow_pickle=" not in call, file


@pytest.fixture
def coded(tmp_path, tiny_target) -> tuple[Path, Path]:
    """A target that brings code with it, and the file that this code makes when it runs."""
    target, mark = tmp_path / "coded", tmp_path / "its-code-ran"
    shutil.copytree(tiny_target, target)
    config = json.loads((target / "config.json").read_text())
    config |= {
        "model_type": "coded",
        "auto_map": {"AutoConfig": "coded.Config", "AutoModelForCausalLM": "coded.Model"},
    }
    (target / "config.json").write_text(json.dumps(config))
    (target / "coded.py").write_text(
        "from pathlib import Path\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(mark)!r}).touch()\n"
        "class Config(LlamaConfig):\n    model_type = 'coded'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
    )
    return target, mark


def test_a_target_s_own_code_needs_permission(coded, run_fails, make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    target, mark = coded
    said = run_fails(2, target__model=str(target))
    assert "trust_remote_code" in said and not mark.exists()
    allowed = make_config(tmp_path, target__model=str(target), target__trust_remote_code=True)
    run_again(allowed, until="features")
    assert mark.exists()


NAMES = [
    "../../x",
    "/tmp/x",
    "..",
    "a/../../b",
    "x\0y",
    "~/x",
    "$(touch x)",
    "C:\\x",
    "\n",
    "x" * 5000,
]


def test_ids_and_names_from_data_never_become_paths(make_config, tmp_path, tiny_seeds):
    """Everything that a run makes is in its directory, under names of its own."""
    inside = tmp_path / "a" / "b" / "c"
    seeds = inside / "seeds" / ".. ; $(touch x)\n.jsonl"
    seeds.parent.mkdir(parents=True)
    rows = read_lines(tiny_seeds)
    for row, name in zip(rows, NAMES, strict=False):
        row |= {"id": name, "category": name, "source": name}
    rows.append({"id": "../../refused", "conversations": "../../refused"})
    write_lines(seeds, *rows)
    before = {path for path in tmp_path.rglob("*")}
    run = run_again(make_config(inside / "runs", seeds__sources=[{"path": str(seeds)}]))
    made = {path for path in tmp_path.rglob("*")} - before - {inside / "runs"}
    assert made and all(path.is_relative_to(run.path) for path in made)
    own = "[A-Za-z0-9._-]+"
    assert all(re.fullmatch(own, path.name) for path in made)
    kept = [row for path in latest(run, "seeds").shards() for row in read_rows(path)]
    assert {row["source_id"] for row in kept} >= {"../../x", "a/../../b"}, (
        "they are data all the same"
    )
    assert all(re.fullmatch(own + ":[0-9]+", row["id"]) for row in kept)


SECRETS = ("hf_" + "SpokenToNobody" * 2, "p4ss-w0rd", "s3cret/value+9=")


def test_what_is_no_secret_is_left_alone():
    text = "basic words to me@example.org, https://huggingface.co/me/x@main, /data/hf_home/x"
    assert redacted(text) == text


@pytest.mark.parametrize(
    "text",
    [
        f"cannot, Bearer {SECRETS[0]}",
        f"404 for url 'https://me:{SECRETS[1]}@mirror.example/api/x?y=1'",
        f"https://{SECRETS[1]}@mirror.example",
        f"Authorization: Basic {SECRETS[1]}",
        f"{{'authorization': 'Bearer {SECRETS[1]}'}}",
        f"login with {SECRETS[2]} failed",
    ],
)
def test_a_secret_is_taken_out_of_a_text(text, monkeypatch):
    monkeypatch.setenv("REGISTRY_PASSWORD", SECRETS[2])
    assert not any(secret in redacted(text) for secret in SECRETS) and "***" in redacted(text)


@pytest.mark.parametrize(
    "changes",
    [
        {"target__model": f"https://me:{SECRETS[1]}@huggingface.co/owner/model"},
        {"seeds__sources": [{"hub": f"https://{SECRETS[1]}@mirror.example/x"}]},
        {"push__repo_id": SECRETS[0]},
        {"generate__engine_args": {"download": {"header": f"Authorization: Bearer {SECRETS[1]}"}}},
    ],
)
def test_a_secret_in_a_setting_is_refused_and_not_printed(make_config, tmp_path, changes):
    key = next(iter(changes)).replace("__", ".")
    with pytest.raises(ConfigError, match=key) as caught:
        make_config(tmp_path, **changes)
    assert (
        not any(secret in str(caught.value) for secret in SECRETS)
        and not (tmp_path / "run").exists()
    )


def push_talkatively(endpoint: str, config: Path) -> None:
    """Push with HF_DEBUG=1, which huggingface_hub otherwise reads when it is imported."""
    os.environ |= {"HF_ENDPOINT": endpoint, "MEDUSA_DISTILL_TRACEBACK": "1"}
    huggingface_hub.constants.HF_DEBUG = True
    huggingface_hub.logging.set_verbosity_debug()
    push_to(endpoint, config)


@pytest.mark.slow
def test_no_secret_is_in_what_a_run_says_or_writes(copied_run, make_settings, tmp_path):
    """A Hub that quotes the token, a mirror whose address has a password, and the push that
    succeeds at last.
    """
    settings = make_settings(tmp_path, push__repo_id="me/heads", push__base_model="owner/target")
    (tmp_path / "push.yaml").write_text(yaml.safe_dump(settings))

    def push(endpoint: str, code: int) -> bytes:
        ended, printed = in_a_fork(push_talkatively, endpoint, tmp_path / "push.yaml")
        assert ended == code, printed
        files = [path for path in copied_run.path.rglob("*") if path.is_file()]
        return b"\n".join([printed.encode(), *(path.read_bytes() for path in files)])

    with HubStandIn() as hub:
        said = push(hub.endpoint.replace("//", f"//me:{SECRETS[1]}@"), 4)
        hub.failures = {"POST /api/models/me/heads/commit": 400}
        said += push(hub.endpoint, 4)
        hub.failures = {}
        said += push(hub.endpoint, 0)
        said += b"\n".join(hub.repositories["me/heads"].files.values())
    assert b"400 Bad Request" in said and b"401" in said and b"Traceback" in said
    assert TOKEN.encode() not in said and SECRETS[1].encode() not in said


def test_rays_dashboard_is_not_started(monkeypatch):
    import ray

    from pipeline.execution.ray_cluster import connect

    asked: list[dict] = []
    monkeypatch.setattr(
        ray, "init", lambda *address, **options: asked.append({"address": address, **options})
    )
    connect(address="")
    assert asked[0]["address"] == ("local",) and asked[0]["include_dashboard"] is False
