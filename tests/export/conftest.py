"""The Hub as a stand-in on loopback, and what is pushed to it."""

from __future__ import annotations

import pytest

from tests.export.hub_stand_in import hub_on_loopback
from tests.export.pushes import (
    backbone_of,
    backbone_to,
    export_to,
    heads_of_export,
)


@pytest.fixture
def export(tmp_path):
    return export_to(tmp_path / "export")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(
        "huggingface_hub.utils._http.time.sleep", lambda seconds: None
    )  # its back-off
    yield from hub_on_loopback(monkeypatch, tmp_path)


@pytest.fixture(params=["heads", "backbone"])
def part(request, tmp_path):
    """Each of the two that a run may publish: a function that prepares it."""
    if request.param == "heads":
        export = export_to(tmp_path / "export")
        return lambda **changes: heads_of_export(export, **changes)
    backbone = backbone_to(tmp_path / "backbone")
    return lambda **changes: backbone_of(backbone, **changes)
