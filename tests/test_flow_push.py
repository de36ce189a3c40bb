"""Heads go to the Hub after a passed check of these very heads, and never otherwise."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal

import pytest
import yaml
from huggingface_hub import ModelCard
from rich.console import Console

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.errors import CheckFailed, ConfigError, DataError
from pipeline.flow import push_run
from pipeline.stages import push
from tests.export.hub_stand_in import hub_on_loopback, push_to
from tests.flows.tiny import (
    edit_summary,
    latest,
    report_of,
    run_again,
    stages_run,
)
from tests.forks import FORKS, PATIENCE

pytestmark = pytest.mark.slow

HUB_IDS = {"push__repo_id": "me/heads", "push__base_model": "owner/target"}
EXPORTED = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "medusa_choices.json",
    "medusa_lm_head.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    yield from hub_on_loopback(monkeypatch, tmp_path)


def push_again(run, **changes):
    usual = {
        "repo_id": "me/heads",
        "private": False,
        "base_model": "owner/target",
        "dry_run": False,
    }
    return push_run(run.path, **{**usual, **changes}, console=Console(quiet=True))


def assert_refused(run, hub, error, failure):
    """Neither a push nor a dry run is made."""
    for dry_run in (True, False):
        with pytest.raises(error, match=failure):
            push_again(run, dry_run=dry_run)
    assert hub.requests == []


def test_a_passed_check_gives_one_commit_and_a_receipt(copied_run, again, tmp_path, hub):
    run = again(**HUB_IDS)
    assert stages_run(run) == ["push"]
    repository = hub.repositories["me/heads"]
    assert repository.files.keys() == EXPORTED and len(repository.commits) == 2
    receipt = json.loads((run.path / "latest/push/receipt.json").read_text())
    assert receipt["commit"] == repository.sha and receipt["repo"] == "me/heads"
    export = run.path / "latest/export"
    assert (
        repository.files["medusa_lm_head.safetensors"]
        == (export / "medusa_lm_head.safetensors").read_bytes()
    )
    assert json.loads(repository.files["config.json"])["base_model_name_or_path"] == "owner/target"
    rate = report_of(run)["check"]["native"]["acceleration_rate"]
    card = repository.files["README.md"].decode()
    assert f"{rate:.2f}" in card and "owner/target" in card and str(tmp_path) not in card


@pytest.mark.parametrize(
    ("limit", "failure"),
    [
        ({"check__min_acceleration_rate": 9}, r"acceleration rate 1\.\d\d is below"),
        ({"check__min_acceleration_rate": 0.5}, "have learned hardly anything"),
    ],
)
def test_a_failed_check_keeps_everything_at_home(copied_run, again, hub, limit, failure):
    with pytest.raises(CheckFailed, match=failure):
        again(**limit, **HUB_IDS)
    assert stages_run(copied_run) == [], "limits are applied to the check that was made"
    assert report_of(copied_run)["check"]["passed"] is False
    assert_refused(copied_run, hub, CheckFailed, failure)
    assert copied_run.latest("push") is None


def test_heads_that_the_check_has_not_seen_are_not_pushed(copied_run, again, hub):
    again(until="export", calibrate__draft_tokens=1)
    assert_refused(copied_run, hub, DataError, "check was made from")
    again(calibrate__draft_tokens=1)
    assert push_again(copied_run)["repo"] == "me/heads"


def test_a_push_without_a_finished_check_gives_advice(again, hub):
    run = again(until="export")
    with pytest.raises(ConfigError, match=r"no finished check stage.*medusa-distill run"):
        push_again(run)


def test_the_push_command_pushes_a_finished_run_once(copied_run, hub):
    first = push_again(copied_run)
    assert hub.repositories["me/heads"].sha == first["commit"]
    push_again(copied_run)
    assert len(hub.repositories["me/heads"].commits) == 2
    assert push_again(copied_run, repo_id="me/other", private=True)["repo"] == "me/other"
    assert hub.repositories["me/other"].private


def test_the_card_is_made_from_the_stages_records(copied_run, again, hub):
    """Without the feature cache, and whatever report.json and run.yaml are now."""

    def card() -> bytes:
        push_again(copied_run)
        return hub.repositories["me/heads"].files["README.md"]

    made, report = card(), copied_run.path / "report.json"
    found = json.loads(report.read_text())
    found["check"]["native"]["acceleration_rate"] = 9.87
    report.write_text(json.dumps(found))
    assert card() == made and b"9.87" not in made
    report.unlink()
    again(until="features", train__lr=0.0025)
    shutil.rmtree(latest(copied_run, "features").path)
    assert card() == made and b"0.0025" not in made


def test_the_card_has_the_target_s_commit_at_the_check(copied_run, hub, monkeypatch):
    """The branch may have moved since; the licence is that of the commit."""
    settings, asked = latest(copied_run, "check").summary["configuration"], []
    settings["target"] |= {"model": "owner/target", "revision": "main"}
    edit_summary(copied_run, "check", configuration=settings, target_revision="c0ffee")
    monkeypatch.setattr(push, "licence_of", lambda *which, online: asked.append((*which, online)))
    push_again(copied_run, dry_run=True)
    assert asked == [("owner/target", "c0ffee", False)] and hub.requests == []
    push_again(copied_run)
    assert "revision: c0ffee" in hub.repositories["me/heads"].files["README.md"].decode()


def test_a_user_alone_names_the_repository_after_the_target(copied_run, make_config, tmp_path, hub):
    wanted = {"push__repo_id": "me/", "push__base_model": "owner/target", "push__license": "mit"}
    config = make_config(tmp_path, **wanted)
    run = run_again(config)
    assert stages_run(run) == ["push"]
    assert hub.repositories.keys() == {"me/target-speculator.medusa"}
    files = hub.repositories["me/target-speculator.medusa"].files
    assert ModelCard(files["README.md"].decode()).data.license == "mit"
    assert not any(str(tmp_path).encode() in data for data in files.values())
    assert stages_run(run_again(config)) == []


def test_a_dry_run_shows_what_would_go_and_touches_nothing(copied_run, hub, monkeypatch, capsys):
    monkeypatch.delenv("HF_TOKEN")
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    before = sorted(copied_run.path.rglob("*"))
    words = ["push", str(copied_run.path), "--repo-id", "me/heads", "--dry-run"]
    code = ends_well(lambda: app(words, standalone_mode=False))
    for name, handler in handlers.items():
        signal.signal(name, handler)
    out, err = capsys.readouterr()
    assert code == 2 and "set --base-model" in err
    assert hub.requests == [] and sorted(copied_run.path.rglob("*")) == before
    assert all(f"  {name}" in out for name in EXPORTED)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("moment", "request_part"),
    [
        ("stalls_before", "PUT /lfs/"),
        ("stalls_after", "POST /api/models/me/heads/commit"),
    ],
    ids=["while the weights go up", "after the commit, without its answer"],
)
def test_a_killed_push_that_is_repeated_is_one_commit(
    copied_run, make_settings, again, tmp_path, hub, moment, request_part
):
    (tmp_path / "push.yaml").write_text(yaml.safe_dump(make_settings(tmp_path, **HUB_IDS)))
    setattr(hub, moment, request_part)
    driver = FORKS.Process(target=push_to, args=(hub.endpoint, tmp_path / "push.yaml"))
    driver.start()
    assert hub.stalled.wait(PATIENCE), "the push never came so far"
    driver.kill()
    driver.join()
    assert driver.exitcode == -signal.SIGKILL
    setattr(hub, moment, "")
    hub.gone.set()
    repository = hub.repositories["me/heads"]
    arrived = len(repository.commits) - 1
    assert arrived == (moment == "stalls_after") and copied_run.latest("push").done is None

    run = again(**HUB_IDS)
    assert stages_run(run) == ["push"] and len(repository.commits) == 2, (
        "the empty one, and ours, once"
    )
    assert repository.files.keys() == EXPORTED
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in repository.files.items()}
    receipt = latest(run, "push").summary
    assert {file["path"]: file["sha256"] for file in receipt["files"]} == sums
    assert (receipt["commit"], receipt["unchanged"]) == (repository.sha, bool(arrived))
    asked = len(hub.requests)
    assert stages_run(again(**HUB_IDS)) == [] and len(hub.requests) == asked


def test_files_that_the_check_has_not_seen_are_not_pushed(copied_run, hub):
    export = copied_run.path / "latest/export"
    (export / "sub").mkdir()
    for name in ("sub/id_rsa", "notes.txt", "tokenizer.model"):
        (export / name).write_text("nobody's business")
    push_again(copied_run)
    assert hub.repositories["me/heads"].files.keys() == EXPORTED
