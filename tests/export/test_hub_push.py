"""Pushing to a stand-in of the Hub that keeps real commits: what arrives, and what is said when the Hub fails."""

from __future__ import annotations

import hashlib
import json

import huggingface_hub.constants
import pytest

from pipeline.errors import EnvironmentFault
from tests.export.hub_stand_in import TOKEN, Repository
from tests.export.pushes import EXPORTED, export_to, push


def test_one_commit_holds_exactly_the_export_with_the_sums_of_the_receipt(export, hub):
    receipt = push(export, hub)
    repository = hub.repositories["me/heads"]
    assert len(repository.commits) == 2  # the empty one, and ours
    assert repository.files.keys() == EXPORTED
    sums = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in repository.files.items()}
    assert {file["path"]: (file["size"], file["sha256"]) for file in receipt["files"]} == sums
    assert (receipt["repo"], receipt["commit"], receipt["unchanged"]) == ("me/heads", repository.sha, False)
    for name in ("medusa_lm_head.safetensors", "medusa_choices.json", "tokenizer.json"):
        assert repository.files[name] == (export / name).read_bytes()


def test_the_card_that_goes_out_was_rendered_after_the_check(export, hub):
    push(export, hub)
    card = hub.repositories["me/heads"].files["README.md"].decode()
    assert "| 2.00 | 1.50 |" in card and '"model": "me/heads"' in card
    assert (export / "README.md").read_text() == "before the check"


def test_a_dry_run_lists_the_same_files_and_touches_no_network(export, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    dry = push(export, hub, dry_run=True)
    assert hub.requests == []
    assert dry["commit"] is None and dry["dry_run"] is True and dry["missing"] == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert dry["files"] == push(export, hub)["files"]


def test_a_finished_push_again_makes_no_commit_and_sends_nothing(export, hub):
    first = push(export, hub)
    sent = hub.bytes_uploaded
    again = push(export, hub)
    assert again["unchanged"] is True and again["commit"] == first["commit"]
    assert len(hub.repositories["me/heads"].commits) == 2
    assert hub.bytes_uploaded == sent


def test_a_push_that_broke_off_continues_without_sending_the_weights_twice(export, hub):
    hub.failures = {"POST /api/models/me/heads/commit": 503}
    with pytest.raises(EnvironmentFault, match=r"503.*Run the same command again"):
        push(export, hub)
    sent, hub.failures = hub.bytes_uploaded, {}
    assert sent == (export / "medusa_lm_head.safetensors").stat().st_size
    push(export, hub)
    assert hub.bytes_uploaded == sent
    assert hub.repositories["me/heads"].files.keys() == EXPORTED


@pytest.mark.parametrize(
    ("request_part", "status"),
    [
        ("GET /api/models", 500),
        ("POST /api/repos/create", 503),
        ("preupload", 502),
        ("lfs/objects/batch", 500),
        ("PUT /lfs/", 503),
        ("/commit/", 500),
        ("POST /api/repos/create", 403),
        ("/commit/", 401),
    ],
)
def test_no_failure_of_the_hub_shows_the_token_or_a_traceback(export, hub, request_part, status):
    hub.failures = {request_part: status}
    with pytest.raises(EnvironmentFault) as caught:
        push(export, hub)
    assert TOKEN not in str(caught.value)
    assert caught.value.__cause__ is None and caught.value.exit_code == 4
    assert ("hf auth login" if status in (401, 403) else "again") in caught.value.fix
    repository = hub.repositories.get("me/heads")
    assert repository is None or len(repository.commits) == 1


def test_a_hub_that_is_not_there_is_an_environment_fault(export, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentFault, match="did not get through"):
        push(export, hub)


def test_offline_mode_is_named(export, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE"):
        push(export, hub)
    assert hub.requests == []


def test_without_a_token_it_says_how_to_get_one(export, hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(EnvironmentFault, match=r"hf auth login.*HF_TOKEN"):
        push(export, hub)
    assert hub.requests == []


def test_a_wrong_token_is_told_from_a_missing_repository(export, hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrongToken")
    with pytest.raises(EnvironmentFault, match=r"answered 401.*must be valid") as caught:
        push(export, hub)
    assert "hf_wrongToken" not in str(caught.value)


def test_the_hub_id_of_a_local_target_is_written_on_the_way_and_the_path_nowhere(tmp_path, hub):
    export = export_to(tmp_path / "export", base_model=str(tmp_path / "target"))
    recipe = {"target": {"model": str(tmp_path / "target")}, "seeds": {"sources": [{"path": str(tmp_path / "x")}]}}
    receipt = push(export, hub, base_model="me/target", recipe=recipe)
    files = hub.repositories["me/heads"].files
    assert json.loads(files["config.json"])["base_model_name_or_path"] == receipt["base_model"] == "me/target"
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    assert json.loads((export / "config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "target")


@pytest.mark.parametrize("private", [True, False])
def test_a_new_repository_is_as_private_as_asked(export, hub, private):
    assert push(export, hub, private=private)["private"] is private
    assert hub.repositories["me/heads"].private is private


def test_a_private_repository_stays_private(export, hub):
    hub.repositories["me/heads"] = Repository(private=True)
    assert push(export, hub, private=False)["private"] is True


def test_files_that_engines_do_not_load_may_stay(export, hub):
    hub.repositories["me/heads"] = Repository(private=False, commits=[{".gitattributes": b"", "LICENSE": b"MIT"}])
    push(export, hub)
    assert hub.repositories["me/heads"].files.keys() == EXPORTED | {".gitattributes", "LICENSE"}
