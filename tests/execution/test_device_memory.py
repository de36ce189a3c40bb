"""This machine's memory, and a GPU driver that torch cannot use."""

from __future__ import annotations

import torch

from pipeline.execution.machine import GIB, machine_memory, unusable_driver


def test_a_container_s_limit_is_the_machine_s_memory(tmp_path):
    limit, none = tmp_path / "memory.max", tmp_path / "unlimited"
    limit.write_text("1073741824\n")
    none.write_text("max\n")
    assert machine_memory((str(limit), str(none), str(tmp_path / "absent"))) == GIB
    assert machine_memory((str(none),)) > GIB


def test_an_unusable_driver_is_named_unless_hidden(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert unusable_driver({}, driver)
    assert unusable_driver({"CUDA_VISIBLE_DEVICES": ""}, driver) is None
    assert unusable_driver({}, tmp_path / "absent") is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert unusable_driver({}, driver) is None
