"""Pushing to a stand-in of the Hub that keeps real commits: what arrives, what is refused, what a
failure leaves.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import huggingface_hub.constants
import pytest

from pipeline.errors import ConfigError, DataError, EnvironmentFault
from pipeline.export.hub import heads_upload, send_all
from tests.export.hub_stand_in import TOKEN, Repository
from tests.export.pushes import (
    EXPORTED,
    backbone_of,
    backbone_to,
    export_to,
    heads_of_export,
    published,
    run_config,
    send,
    sums,
)

WEIGHTS = "medusa_lm_head.safetensors"


def only_repository(hub):
    (repository,) = hub.repositories.values()
    return repository


# --- what arrives


def test_one_commit_holds_exactly_the_files_of_the_receipt(part, hub, monkeypatch):
    with monkeypatch.context() as without_token:
        without_token.delenv("HF_TOKEN")
        dry = part().dry_run(private=False)
    assert hub.requests == [] and dry["commit"] is None
    receipt, repository = send(part()), only_repository(hub)
    assert receipt["files"] == dry["files"] and len(repository.commits) == 2  # one is the empty one
    found = {}
    for name, data in repository.files.items():
        found[name] = (len(data), hashlib.sha256(data).hexdigest())
    assert {file["path"]: (file["size"], file["sha256"]) for file in receipt["files"]} == found
    assert receipt["repo"] == "me/pushed" and not receipt["unchanged"]
    sent = hub.bytes_uploaded
    again = send(part())
    assert again["unchanged"] and again["commit"] == receipt["commit"] == repository.sha
    assert len(repository.commits) == 2 and hub.bytes_uploaded == sent


def test_every_format_names_the_hub_id_of_a_local_target(tmp_path, hub):
    target = str(tmp_path / "target")
    export = export_to(tmp_path / "export", "shared", base_model=target)
    config = run_config(target, {"path": str(tmp_path / "seeds.jsonl")})
    receipt = send(heads_of_export(export, config=config, base_model="me/target"))
    files = only_repository(hub).files
    assert files.keys() == EXPORTED | {f"shared/{name}" for name in EXPORTED - {"README.md"}}
    for name in ("config.json", "shared/config.json"):
        named = json.loads(files[name])["base_model_name_or_path"]
        assert named == receipt["base_model"] == "me/target"
    assert (export / "README.md").read_text() == "before the check"
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]


@pytest.mark.parametrize(("existing", "asked"), [(False, True), (False, False), (True, False)])
def test_a_repository_keeps_its_privacy_and_other_files(export, hub, existing, asked):
    theirs = {".gitattributes": b"", "LICENSE": b"MIT"} if existing else {}
    if existing:
        hub.repositories["me/pushed"] = Repository(private=True, commits=[theirs])
    is_private = existing or asked
    assert send(heads_of_export(export), private=asked)["private"] is is_private
    assert only_repository(hub).private is is_private
    assert only_repository(hub).files.keys() == EXPORTED | theirs.keys()


# --- what is refused


@pytest.mark.parametrize("name", sorted(EXPORTED - {"README.md"}))
@pytest.mark.parametrize("change", ["another byte", "a link to the same", "gone"])
def test_a_file_that_is_not_as_checked_is_refused(export, name, change):
    checked, file = sums(export), export / name
    if change == "another byte":
        file.write_bytes(file.read_bytes() + b" ")
    else:
        file.rename(export.parent / name)
    if change == "a link to the same":
        file.symlink_to(export.parent / name)
    with pytest.raises(DataError) as refused:
        heads_upload(export, published(), checked)
    assert Path(refused.value.where) in (file, export)


@pytest.mark.parametrize("named", ["target", "backbone"])
def test_a_file_with_a_local_path_is_refused(tmp_path, hub, named):
    path, config = str(tmp_path / named), run_config(str(tmp_path / "target"))
    text = json.dumps({"name_or_path": path})
    export = export_to(tmp_path / "export", base_model=path, tokenizer=text)
    backbone = backbone_to(tmp_path / "backbone")
    (backbone / "tokenizer.json").write_text(text)
    heads = heads_of_export(export, config=config, base_model="me/target")
    for upload in (heads, backbone_of(backbone, config=config)):
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            send(upload)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("which", "names"),
    [
        ("heads", ["model.safetensors", "config.json"]),
        ("heads", ["pytorch_model.bin"]),
        ("heads", ["medusa_choices.json", "model.safetensors"]),
        ("backbone", ["config.json"]),
        ("backbone", [WEIGHTS, "config.json"]),
    ],
)
def test_another_model_is_never_written_over(tmp_path, export, hub, which, names):
    theirs = dict.fromkeys(names, b"theirs")
    hub.repositories[f"me/{which}"] = Repository(private=False, commits=[theirs])
    uploads = {
        "backbone": backbone_of(backbone_to(tmp_path / "backbone"), repo_id="me/backbone"),
        "heads": heads_of_export(export, repo_id="me/heads"),
    }
    with pytest.raises(ConfigError):
        send_all(uploads, private=False)
    assert hub.repositories.keys() == {f"me/{which}"}, "nor is anything sent to the other one"
    assert only_repository(hub).commits == [theirs]


def test_private_heads_never_go_to_a_public_repository(export, hub):
    hub.repositories["me/pushed"] = Repository(private=False)
    with pytest.raises(ConfigError, match=r"push\.private"):
        send(heads_of_export(export), private=True)
    assert len(only_repository(hub).commits) == 1


# --- what changes or fails on the way


def test_a_small_file_goes_as_it_was_compared(export, hub):
    upload = heads_of_export(export)
    (export / "tokenizer.json").write_text('{"another": 1}')
    send(upload)
    assert only_repository(hub).files["tokenizer.json"] == b"{}"


def test_weights_that_change_after_the_comparison_do_not_arrive(export, hub):
    upload, weights = heads_of_export(export), export / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b" ")
    with pytest.raises(EnvironmentFault):
        send(upload)
    assert only_repository(hub).files == {}


@pytest.mark.parametrize(
    ("failing", "status", "fix"),
    [
        ("GET /api/models", 500, "again"),
        ("lfs/objects/batch", 500, "again"),
        ("PUT /lfs/", 503, "again"),
        ("/commit/", 500, "again"),
        ("POST /api/repos/create", 403, "hf auth login"),
    ],
)
def test_a_failing_hub_is_an_environment_fault_without_the_token(export, hub, failing, status, fix):
    hub.failures = {failing: status}
    with pytest.raises(EnvironmentFault) as failed:
        send(heads_of_export(export))
    assert TOKEN not in str(failed.value) and failed.value.__cause__ is None
    assert failed.value.exit_code == 4 and fix in failed.value.fix
    assert all(len(repository.commits) == 1 for repository in hub.repositories.values())


@pytest.mark.parametrize(
    ("constant", "value", "token", "fix"),
    [
        ("ENDPOINT", "http://127.0.0.1:9", TOKEN, "HF_ENDPOINT"),
        ("HF_HUB_OFFLINE", True, TOKEN, "HF_HUB_OFFLINE"),
        ("HF_HUB_OFFLINE", False, "", "HF_TOKEN"),
        ("HF_HUB_OFFLINE", False, "hf_wrongToken", "HF_TOKEN"),
    ],
)
def test_without_hub_or_token_the_fix_names_the_variable(
    export, hub, monkeypatch, constant, value, token, fix
):
    monkeypatch.setattr(huggingface_hub.constants, constant, value)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(EnvironmentFault) as failed:
        send(heads_of_export(export))
    assert fix in failed.value.fix and "hf_wrongToken" not in str(failed.value)
    assert hub.repositories == {}
