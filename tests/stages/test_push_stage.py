"""A push declares what the target's card stated at the commit that the check has read."""

from __future__ import annotations

from rich.console import Console

from pipeline.flow import push_run
from pipeline.stages import push
from tests.flows.tiny import edit_summary, latest


def test_a_licence_is_that_of_the_checked_commit(copied_run, monkeypatch):
    made_by = latest(copied_run, "check").summary["configuration"]
    target = made_by["target"] | {"model": "owner/target", "revision": "main"}
    edit_summary(
        copied_run, "check", configuration=made_by | {"target": target}, target_revision="c0ffee"
    )
    asked = []
    monkeypatch.setattr(push, "licence_of", lambda *which, online: asked.append((*which, online)))
    push_run(copied_run.path, repo_id="me/heads", dry_run=True, console=Console(quiet=True))
    assert asked == [("owner/target", "c0ffee", False)]
