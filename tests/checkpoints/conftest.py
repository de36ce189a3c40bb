"""The Hub as a stand-in on loopback, and an export to push to it."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub.constants
import pytest
from huggingface_hub import close_session

from tests.checkpoints.hub_stand_in import TOKEN, HubStandIn
from tests.checkpoints.pushes import export_to


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
