"""Work in a new interpreter, so that nothing of an engine stays behind in the caller; its errors come back as they are.

The caller's half is `in_own_process`, that of the module which does the work `work_off`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pipeline
from pipeline import errors


def in_own_process(module: str, tasks: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What `python -m module` makes of each task, one after the other; tasks and results are JSON.

    Raises:
        MedusaDistillError: What the module raised, and EnvironmentFault where its process ended without a word.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-") as directory:
        task_file, result_file = Path(directory, "task.json"), Path(directory, "result.json")
        task_file.write_text(json.dumps(tasks), encoding="utf-8")
        command = [sys.executable, "-m", module, str(task_file), str(result_file)]
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True, errors="replace")
        if not result_file.is_file():
            fix = "Free memory, or take vllm out of check.engines."
            what = f"vLLM ended with status {ended.returncode}: {last_line(ended.stderr)}"
            raise errors.EnvironmentFault(what, "check.engines: vllm", fix)
        result = json.loads(result_file.read_text(encoding="utf-8"))
    if "error" in result:
        raise getattr(errors, result["error"])(*result["args"])
    return result["found"]


def work_off(function: Callable[[Mapping[str, Any]], Any], task_file: str, result_file: str) -> None:
    """The child process: read the tasks, do them, write the results or the error."""
    try:
        tasks = json.loads(Path(task_file).read_text(encoding="utf-8"))
        result: dict[str, Any] = {"found": [function(task) for task in tasks]}
    except errors.MedusaDistillError as error:
        result = {"error": type(error).__name__, "args": error.args}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def environment() -> dict[str, str]:
    """This process's, in which a new interpreter finds this package."""
    path = os.pathsep.join(filter(None, [str(Path(pipeline.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def last_line(text: str) -> str:
    """The last line that says something, cut to 300 characters."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")[:300]
