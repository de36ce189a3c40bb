"""The recording of the demo."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import record_demo


def test_a_failed_demo_is_not_recorded(tmp_path, monkeypatch):
    (tmp_path / "make").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "make").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(record_demo, "IMAGES", tmp_path)
    assert record_demo.main() == 2
    assert [file.name for file in tmp_path.iterdir()] == ["make"]
