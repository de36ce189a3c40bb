"""What is never pushed: unchecked heads, local paths, other models' repositories, what is no export."""

from __future__ import annotations

import json

import pytest

from pipeline.errors import CheckFailed, ConfigError, DataError, EnvironmentFault
from pipeline.export.hub import prepare_export
from pipeline.export.parcel import Push
from tests.export.hub_stand_in import Repository
from tests.export.pushes import EXPORTED, PASSED, export_to, push, sums

PUSH = Push("me/heads", report=PASSED, recipe={})


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("report", "said"),
    [
        (None, "have not been checked"),
        ({"num_heads": 1}, "have not been checked"),
        ({"check": {}}, "have not been checked"),
        ({"check": {"native": PASSED["check"]["native"]}}, "the check stage says so"),
        (PASSED | {"check": PASSED["check"] | {"passed": False}}, "the check stage says so"),
        (PASSED | {"check": PASSED["check"] | {"failures": ["too slow."]}}, "too slow"),
    ],
)
def test_heads_without_a_passed_check_are_not_pushed(export, hub, report, said, dry_run):
    with pytest.raises(CheckFailed, match=said) as caught:
        push(export, hub, report=report, dry_run=dry_run)
    assert caught.value.exit_code == 1
    assert hub.requests == []


@pytest.mark.parametrize("name", sorted(EXPORTED - {"README.md"}))
@pytest.mark.parametrize("change", ["another byte", "a link to the same"])
def test_a_file_that_is_not_what_was_checked_is_not_pushed(export, hub, name, change):
    checked, file = sums(export), export / name
    if change == "another byte":
        file.write_bytes(file.read_bytes() + b" ")
    else:
        file.rename(export.parent / name)
        file.symlink_to(export.parent / name)
    with pytest.raises(DataError) as refused:
        prepare_export(export, PUSH, checked)
    assert refused.value.where == str(file) and hub.requests == []


def test_a_file_that_changes_after_it_was_compared_goes_as_compared(export, hub):
    prepared = prepare_export(export, PUSH, sums(export))
    (export / "tokenizer.json").write_text('{"another": 1}')
    prepared.send()
    assert hub.repositories["me/heads"].files["tokenizer.json"] == b"{}"


def test_weights_that_change_after_they_were_compared_do_not_arrive(export, hub):
    prepared, weights = prepare_export(export, PUSH, sums(export)), export / "medusa_lm_head.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b" ")
    with pytest.raises(EnvironmentFault):
        prepared.send()
    assert hub.repositories["me/heads"].files == {}


def test_heads_of_a_local_target_need_its_hub_id(tmp_path, hub):
    export = export_to(tmp_path / "export", base_model=str(tmp_path / "target"))
    with pytest.raises(ConfigError, match=r"push\.base_model=USER/NAME"):
        push(export, hub)
    assert hub.requests == []
    assert "push.base_model" in push(export, hub, dry_run=True)["missing"][0]


def test_a_tokenizer_that_names_the_local_path_is_not_pushed(tmp_path, hub):
    target = str(tmp_path / "target")
    export = export_to(tmp_path / "export", base_model=target, tokenizer=json.dumps({"name_or_path": target}))
    with pytest.raises(DataError, match=r"tokenizer\.json names the target's local path"):
        push(export, hub, base_model="me/target")
    assert hub.requests == []


def test_private_heads_never_go_to_a_public_repository(export, hub):
    hub.repositories["me/heads"] = Repository(private=False)
    with pytest.raises(ConfigError, match="repository is public"):
        push(export, hub, private=True)
    assert len(hub.repositories["me/heads"].commits) == 1


@pytest.mark.parametrize("names", [["model.safetensors", "config.json"], ["pytorch_model.bin"], ["config.json"]])
def test_a_repository_that_holds_another_model_is_not_written_to(export, hub, names):
    hub.repositories["me/heads"] = Repository(private=False, commits=[dict.fromkeys(names, b"theirs")])
    with pytest.raises(ConfigError, match="holds something else"):
        push(export, hub)
    assert hub.repositories["me/heads"].commits == [dict.fromkeys(names, b"theirs")]


@pytest.mark.parametrize("repo_id", ["heads", "me/heads/x", "me/..", "", "/models/heads"])
def test_a_repository_needs_owner_and_name(export, hub, repo_id):
    with pytest.raises(ConfigError):
        push(export, hub, repo_id=repo_id)
    assert hub.requests == []


@pytest.mark.parametrize("gone", ["medusa_lm_head.safetensors", "config.json", "medusa_choices.json"])
def test_a_directory_that_is_no_export_is_refused(export, hub, gone):
    (export / gone).unlink()
    with pytest.raises(DataError, match=gone):
        push(export, hub)


def test_weights_that_are_not_heads_are_not_pushed_along(export, hub):
    (export / "backbone").mkdir()
    (export / "backbone" / "model.safetensors").write_bytes(b"")
    with pytest.raises(DataError, match=r"backbone/model\.safetensors"):
        push(export, hub)
