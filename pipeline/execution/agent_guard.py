"""End Ray's agents with the driver that started their cluster.

When a driver is killed, the kernel ends the cluster's head, scheduler and workers with it. The two agents notice within
two seconds and then try for a minute to tell the dead head of it, which matters to whoever counts a node's processes.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

WAIT_AND_KILL = 'read nothing; kill -KILL "$@"'  # the pipe ends with the process that holds it


class AgentGuard:
    """A shell that waits for this process's end and then ends the agents of a raylet.

    Args:
        raylet: Its process id.
    """

    def __init__(self, raylet: int):
        self.agents = children(raylet)
        command = ["/bin/sh", "-c", WAIT_AND_KILL, "sh", *map(str, self.agents)]
        self._shell = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )

    @classmethod
    def of_own_cluster(cls) -> AgentGuard:
        """For the cluster that this process has just started."""
        from ray._private.worker import _global_node

        return cls(_global_node.all_processes["raylet"][0].process.pid)

    def close(self) -> None:
        """The cluster was stopped: end the agents now, where they have not ended with it."""
        self._shell.communicate()


def children(parent: int) -> list[int]:
    """The processes of this machine that a process has started, by /proc; none where there is no /proc."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, _, rest = stat.read_text(encoding="utf-8", errors="replace").partition(" ")
            if int(rest.rpartition(")")[2].split()[1]) == parent:
                found.append(int(pid))
        except (OSError, IndexError, ValueError):
            continue  # it has just ended
    return found
