"""Pushing to a stand-in of the Hub that keeps real commits: what arrives, what is refused, what is said."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub import close_session

from pipeline.checkpoints.hub import push_export, require_passed_check
from pipeline.checkpoints.layout import ExportConfig
from pipeline.checkpoints.medusa import write_export
from pipeline.errors import CheckFailed, ConfigError, DataError, EnvironmentFault
from tests.checkpoints.hub_stand_in import TOKEN, HubStandIn, Repository

MATCH = {"sequences": 4, "identical": 4, "ties": 0}
PASSED = {
    "num_heads": 1,
    "check": {
        "passed": True,
        "native": {"acceleration_rate": 2.0, "greedy_match": MATCH},
        "vllm": {"acceleration_rate": 1.5, "greedy_match": MATCH},
    },
}
EXPORTED = {"README.md", "config.json", "medusa_choices.json", "medusa_lm_head.safetensors", "tokenizer.json"}


class TokenizerStub:
    def __init__(self, text: str = "{}"):
        self.text = text

    def save_pretrained(self, directory: str) -> None:
        Path(directory, "tokenizer.json").write_text(self.text)


def export_to(directory: Path, base_model: str = "owner/target", tokenizer: str = "{}") -> Path:
    config = ExportConfig(base_model, hidden_size=4, vocab_size=6, num_heads=1)
    tensors = {"0.0.linear.weight": torch.ones(4, 4), "0.0.linear.bias": torch.ones(4), "0.1.weight": torch.ones(6, 4)}
    write_export(directory, tensors, config, tokenizer=TokenizerStub(tokenizer), choices=[[0]], card="before the check")
    for bookkeeping in ("stage.json", "DONE.json", "lock", ".hidden"):
        (directory / bookkeeping).write_text(str(directory))
    return directory


@pytest.fixture
def export(tmp_path) -> Path:
    return export_to(tmp_path / "export")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # its back-off
    close_session()
    with HubStandIn() as stand_in:
        yield stand_in
    close_session()


def push(export: Path, hub: HubStandIn, **changes) -> dict:
    arguments = {"repo_id": "me/heads", "report": PASSED, "recipe": {}, "endpoint": hub.endpoint} | changes
    return push_export(export, **arguments)


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
    assert dry["files"] == push(export, hub, token=TOKEN)["files"]


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


def test_a_hub_that_is_not_there_is_an_environment_fault(export, hub):
    with pytest.raises(EnvironmentFault, match="did not get through"):
        push(export, hub, endpoint="http://127.0.0.1:9")


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


def test_a_wrong_token_is_told_from_a_missing_repository(export, hub):
    with pytest.raises(EnvironmentFault, match=r"answered 401.*must be valid") as caught:
        push(export, hub, token="hf_wrongToken")
    assert "hf_wrongToken" not in str(caught.value)


def changed(engine: str, **figures) -> dict:
    return PASSED | {"check": PASSED["check"] | {engine: PASSED["check"][engine] | figures}}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("report", "said"),
    [
        (None, "have not been checked"),
        ({"num_heads": 1}, "have not been checked"),
        ({"check": {"passed": True}}, "have not been checked"),
        (PASSED | {"check": PASSED["check"] | {"passed": False}}, "the check stage says so"),
        (PASSED | {"check": PASSED["check"] | {"failures": ["too slow."]}}, "too slow"),
        (changed("native", acceleration_rate=0.99), "0.99"),
        (changed("native", acceleration_rate=float("nan")), "nan"),
        (changed("vllm", acceleration_rate=1.0), "vllm is 1.0"),
        (changed("native", greedy_match=MATCH | {"identical": 2, "ties": 1}), "1 of 4 greedy sequences"),
    ],
)
def test_heads_without_a_passed_check_are_not_pushed(export, hub, report, said, dry_run):
    with pytest.raises(CheckFailed, match=said) as caught:
        push(export, hub, report=report, dry_run=dry_run)
    assert caught.value.exit_code == 1
    assert hub.requests == []


def test_sequences_that_part_at_a_tie_do_not_fail_the_check():
    report = changed("native", greedy_match={"sequences": 4, "identical": 3, "ties": 1})
    assert require_passed_check(report) is report


def test_a_check_in_one_engine_alone_is_a_check():
    report = {"check": {"native": PASSED["check"]["native"]}}
    assert require_passed_check(report) is report


def test_heads_of_a_local_target_need_its_hub_id(tmp_path, hub):
    export = export_to(tmp_path / "export", base_model=str(tmp_path / "target"))
    with pytest.raises(ConfigError, match=r"push\.base_model=USER/NAME"):
        push(export, hub)
    assert hub.requests == []
    assert "push.base_model" in push(export, hub, dry_run=True)["missing"][0]


def test_the_hub_id_of_a_local_target_is_written_on_the_way_and_the_path_nowhere(tmp_path, hub):
    export = export_to(tmp_path / "export", base_model=str(tmp_path / "target"))
    recipe = {"target": {"model": str(tmp_path / "target")}, "seeds": {"sources": [{"path": str(tmp_path / "x")}]}}
    receipt = push(export, hub, base_model="me/target", recipe=recipe)
    files = hub.repositories["me/heads"].files
    assert json.loads(files["config.json"])["base_model_name_or_path"] == receipt["base_model"] == "me/target"
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    assert json.loads((export / "config.json").read_text())["base_model_name_or_path"] == str(tmp_path / "target")


def test_a_tokenizer_that_names_the_local_path_is_not_pushed(tmp_path, hub):
    target = str(tmp_path / "target")
    export = export_to(tmp_path / "export", base_model=target, tokenizer=json.dumps({"name_or_path": target}))
    with pytest.raises(DataError, match=r"tokenizer\.json names the target's local path"):
        push(export, hub, base_model="me/target")
    assert hub.requests == []


@pytest.mark.parametrize("private", [True, False])
def test_a_new_repository_is_as_private_as_asked(export, hub, private):
    assert push(export, hub, private=private)["private"] is private
    assert hub.repositories["me/heads"].private is private


def test_private_heads_never_go_to_a_public_repository(export, hub):
    hub.repositories["me/heads"] = Repository(private=False)
    with pytest.raises(ConfigError, match="repository is public"):
        push(export, hub, private=True)
    assert len(hub.repositories["me/heads"].commits) == 1


def test_a_private_repository_stays_private(export, hub):
    hub.repositories["me/heads"] = Repository(private=True)
    assert push(export, hub, private=False)["private"] is True


@pytest.mark.parametrize("names", [["model.safetensors", "config.json"], ["pytorch_model.bin"], ["config.json"]])
def test_a_repository_that_holds_another_model_is_not_written_to(export, hub, names):
    hub.repositories["me/heads"] = Repository(private=False, commits=[dict.fromkeys(names, b"theirs")])
    with pytest.raises(ConfigError, match="holds something else"):
        push(export, hub)
    assert hub.repositories["me/heads"].commits == [dict.fromkeys(names, b"theirs")]


def test_files_that_engines_do_not_load_may_stay(export, hub):
    hub.repositories["me/heads"] = Repository(private=False, commits=[{".gitattributes": b"", "LICENSE": b"MIT"}])
    push(export, hub)
    assert hub.repositories["me/heads"].files.keys() == EXPORTED | {".gitattributes", "LICENSE"}


@pytest.mark.parametrize("repo_id", ["heads", "me/heads/x", "me/..", "", "/models/heads"])
def test_a_repository_needs_owner_and_name(export, hub, repo_id):
    with pytest.raises(ConfigError):
        push(export, hub, repo_id=repo_id)
    assert hub.requests == []


@pytest.mark.parametrize("gone", ["medusa_lm_head.safetensors", "config.json"])
def test_a_directory_that_is_no_export_is_refused(export, hub, gone):
    (export / gone).unlink()
    with pytest.raises(DataError, match=gone):
        push(export, hub)


def test_weights_that_are_not_heads_are_not_pushed_along(export, hub):
    (export / "backbone").mkdir()
    (export / "backbone" / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"backbone/model\.safetensors"):
        push(export, hub)
