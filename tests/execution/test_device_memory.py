"""This machine's memory."""

from __future__ import annotations

from pipeline.execution import machine
from pipeline.execution.machine import GIB, machine_memory


def test_a_container_s_limit_is_the_machine_s_memory(tmp_path, monkeypatch):
    limit, none = tmp_path / "memory.max", tmp_path / "unlimited"
    limit.write_text("1073741824\n")
    none.write_text("max\n")
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (limit, none, tmp_path / "absent"))
    assert machine_memory() == GIB
    monkeypatch.setattr(machine, "CGROUP_LIMITS", (none,))
    assert machine_memory() > GIB
