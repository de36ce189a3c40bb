"""This machine's memory, and a GPU driver that torch cannot use."""

from __future__ import annotations

import torch

from pipeline.execution import machine
from pipeline.execution.machine import GIB, machine_memory, unusable_driver


def test_a_container_s_limit_is_the_machine_s_memory(tmp_path, monkeypatch):
    limit, none = tmp_path / "memory.max", tmp_path / "unlimited"
    limit.write_text("1073741824\n")
    none.write_text("max\n")
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (limit, none, tmp_path / "absent"))
    assert machine_memory() == GIB
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (none,))
    assert machine_memory() > GIB


def test_an_unusable_driver_is_named_unless_hidden(tmp_path, monkeypatch):
    driver = tmp_path / "version"
    driver.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "DRIVER", driver)
    for visible, cuda in (("", "13.0"), ("0", None)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert unusable_driver() is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert unusable_driver()
    driver.unlink()
    assert unusable_driver() is None
