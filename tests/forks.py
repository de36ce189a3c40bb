"""Fork processes from a server that has imported the pipeline, torch and transformers.

A fork costs less than a second, and the imports six to eight.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
from pathlib import Path

import psutil

FORKS = multiprocessing.get_context("forkserver")
LOADED = [
    *("pipeline.cli.app", "pipeline.flow", "transformers.models.llama.modeling_llama"),
    *(
        "pandas",
        "torch.utils.tensorboard",
        "tests.unsynced",
        "tests.frozen",
    ),
]
FORKS.set_forkserver_preload(LOADED)
PATIENCE = 120  # seconds


def serve_forks():
    """Start this process's fork server with all imports.

    A process has one server: other libraries that fork use this one.
    """
    multiprocessing.forkserver.ensure_running()


def has_ended(pid):
    """Return whether a process has ended."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def in_a_fork(function, *arguments):
    """Call a function in a fork; return its exit code and its output."""
    with tempfile.TemporaryDirectory() as directory:
        said = Path(directory) / "said"
        process = FORKS.Process(target=_call, args=(said, function, *arguments))
        process.start()
        process.join(PATIENCE)
        return process.exitcode, said.read_text()


def _call(said, function, *arguments):
    file = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    function(*arguments)
