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
from tests.flows.tiny import latest, run_again
from tests.forks import in_a_fork

pytest_plugins = ["tests.flows.failing"]

ROOT = Path(__file__).parent.parent
RUN_CODE = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "imp",
}
ALLOWED = {
    ("targets/loading.py", "pickle.UnpicklingError"),  # to catch it
    ("export/weights.py", "pickle.UnpicklingError"),
    ("targets/own_process.py", "pickle"),  # results of its own child, in a directory of its own
}


def found_in(file: Path) -> set[str]:
    """Names in a module that could run somebody's bytes."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.split(".")[0] in RUN_CODE}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUN_CODE:
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Call):
            name, words = ast.unparse(node.func), {word.arg: word.value for word in node.keywords}
            safely = (
                isinstance(words.get("weights_only"), ast.Constant)
                and words["weights_only"].value is True
            )
            if name == "torch.load" and not safely:
                found.add("torch.load without weights_only=True")
            if "allow_pickle" in words or name.endswith(
                ("read_pickle", "unsafe_load", "full_load", "yaml.load")
            ):
                found.add(ast.unparse(node))
            if name in ("eval", "exec", "compile", "__import__", "os.system") or "shell" in words:
                found.add(ast.unparse(node))
    return found


def test_no_module_unpickles_or_evaluates_anything():
    files = [*(ROOT / "pipeline").rglob("*.py")]
    assert len(files) > 50
    found = {
        (str(file.relative_to(ROOT / "pipeline")), what)
        for file in files
        for what in found_in(file)
    }
    assert found == ALLOWED


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
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
    run_again(make_config(tmp_path / "known", target__model=str(target)), until="features")
    assert not mark.exists(), "transformers has a class of its own for it"
    (target / "config.json").write_text(json.dumps(config))
    run_again(
        make_config(tmp_path, target__model=str(target), target__trust_remote_code=True),
        until="features",
    )
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
    rows = [json.loads(line) for line in tiny_seeds.read_text().splitlines()]
    for row, name in zip(rows, NAMES, strict=False):
        row |= {"id": name, "category": name, "source": name}
    rows.append({"id": "../../refused", "conversations": "../../refused"})
    seeds.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    "text",
    [
        "basic concepts, plain words",
        "mail me@example.org",
        "https://huggingface.co/me/x@main",
        "/data/hf_home/x",
    ],
)
def test_what_is_no_secret_is_left_alone(text):
    assert redacted(text) == text


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


def everything_written(run: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in run.rglob("*") if path.is_file())


def test_events_hold_no_secret_of_a_traceback(copied_run, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRETS[2])
    copied_run.event(
        "shard-failed",
        shard=3,
        error=f'File "x"\nOSError: https://me:{SECRETS[1]}@host/ {SECRETS[2]}',
    )
    line = (copied_run.path / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(line)["shard"] == 3 and not any(secret in line for secret in SECRETS)


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
        return printed.encode() + b"\n" + everything_written(copied_run.path)

    with HubStandIn() as hub:
        said = push(hub.endpoint.replace("//", f"//me:{SECRETS[1]}@"), 4)
        hub.failures = {"POST /api/models/me/heads/commit": 400}
        said += push(hub.endpoint, 4)
        hub.failures = {}
        said += push(hub.endpoint, 0)
        said += b"\n".join(hub.repositories["me/heads"].files.values())
    assert b"400 Bad Request" in said and b"401" in said and b"Traceback" in said
    told = [
        line for line in said.splitlines() if TOKEN.encode() in line or SECRETS[1].encode() in line
    ]
    assert not told


def test_rays_dashboard_is_not_started(monkeypatch):
    import ray

    from pipeline.execution.ray_cluster import connect

    asked: list[dict] = []
    monkeypatch.setattr(
        ray, "init", lambda *address, **options: asked.append({"address": address, **options})
    )
    connect(address="")
    assert asked[0]["address"] == ("local",) and asked[0]["include_dashboard"] is False
    assert not [
        file for file in (ROOT / "pipeline").rglob("*.py") if "dashboard_host" in file.read_text()
    ]
