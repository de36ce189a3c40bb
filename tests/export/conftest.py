"""The Hub as a stand-in on loopback, and an export to push to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.hub_stand_in import hub_on_loopback
from tests.export.pushes import export_to


@pytest.fixture
def export(tmp_path) -> Path:
    return export_to(tmp_path / "export")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)  # its back-off
    yield from hub_on_loopback(monkeypatch, tmp_path)
