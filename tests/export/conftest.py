"""The Hub as a stand-in on loopback, and what is pushed to it."""

from __future__ import annotations

import pytest

from tests.export.hub_stand_in import hub_on_loopback
from tests.export.pushes import (
    backbone_of,
    backbone_to,
    conversations_of,
    export_to,
    heads_of_export,
)
from tests.flows.tiny import latest


@pytest.fixture
def export(tmp_path):
    return export_to(tmp_path / "export")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "huggingface_hub.utils._http.time.sleep", lambda seconds: None
    )  # its back-off
    yield from hub_on_loopback(monkeypatch, tmp_path)


@pytest.fixture(params=["heads", "backbone", "conversations"])
def part(request, tmp_path):
    """Each of the three that a run may publish: a function that prepares it."""
    if request.param == "heads":
        export = export_to(tmp_path / "export")
        return lambda **changes: heads_of_export(export, **changes)
    if request.param == "backbone":
        backbone = backbone_to(tmp_path / "backbone")
        return lambda **changes: backbone_of(backbone, **changes)
    stage = latest(request.getfixturevalue("finished_run"), "generate")
    return lambda **changes: conversations_of(stage, tmp_path, **changes)
