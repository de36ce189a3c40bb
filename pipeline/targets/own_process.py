"""Work in a new interpreter, so that nothing of an engine stays behind in the caller; its errors
come back as they are.

The caller's half is `in_own_process`, that of the module which does the work `work_off`. How far
the work has come travels in a `ProgressFile`, which the waiting caller reads twice a second.
"""

from __future__ import annotations

import contextlib
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
from pipeline.storage.progress_file import ProgressFile

Tell = Callable[..., None]  # part, done, total, unit, note: how far the work has come

SECONDS_BETWEEN_LOOKS = 0.5


def in_own_process(
    module: str,
    tasks: Sequence[Mapping[str, Any]],
    told: Tell | None = None,
    defaults: Mapping[str, str] | None = None,
) -> list[Any]:
    """What `python -m module` makes of each task, one after the other; tasks and results are JSON.

    Args:
        told: Called with what the work tells of its progress, as keywords.
        defaults: Variables of its environment where this process's has none of these names.

    Raises:
        MedusaDistillError: What the module raised, and EnvironmentFault where its process ended
            without a word.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-") as directory:
        task_file, result_file = Path(directory, "task.json"), Path(directory, "result.json")
        task_file.write_text(json.dumps(tasks), encoding="utf-8")
        command = [sys.executable, "-m", module, str(task_file), str(result_file)]
        environ = {**(defaults or {}), **environment()}
        status, output = _run(command, environ, lambda: _pass_on(_progress_beside(task_file), told))
        if not result_file.is_file():
            fix = "Free memory, or take vllm out of check.engines."
            what = f"vLLM ended with status {status}: {last_line(output)}"
            raise errors.EnvironmentFault(what, "check.engines: vllm", fix)
        result = json.loads(result_file.read_text(encoding="utf-8"))
    if "error" in result:
        raise getattr(errors, result["error"])(*result["args"])
    return result["found"]


def _run(
    command: Sequence[str], environ: Mapping[str, str], meanwhile: Callable[[], None]
) -> tuple[int, str]:
    """Exit status and standard error of a process, which does not outlive this call."""
    pipes: dict[str, Any] = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "text": True,
        "errors": "replace",
    }
    with subprocess.Popen(command, env=environ, **pipes) as process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, output = process.communicate(timeout=SECONDS_BETWEEN_LOOKS)
                    return process.returncode, output
                meanwhile()
        except BaseException:
            process.kill()
            raise


def _pass_on(file: ProgressFile, told: Tell | None) -> None:
    progress = file.read()
    if told and progress:
        told(**progress)


def _progress_beside(task_file: Path) -> ProgressFile:
    return ProgressFile(task_file.with_name("progress.json"))


def work_off(
    function: Callable[[Mapping[str, Any], Tell], Any], task_file: str, result_file: str
) -> None:
    """The child process: read the tasks, do them, write the results or the error."""
    file = _progress_beside(Path(task_file))
    part: str | None = None

    def tell(**progress: Any) -> None:
        nonlocal part
        file.write(progress, at_once=progress.get("part") != part)
        part = progress.get("part")

    try:
        tasks = json.loads(Path(task_file).read_text(encoding="utf-8"))
        result: dict[str, Any] = {"found": [function(task, tell) for task in tasks]}
    except errors.MedusaDistillError as error:
        result = {"error": type(error).__name__, "args": error.args}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


def environment() -> dict[str, str]:
    """This process's, in which a new interpreter finds this package."""
    path = os.pathsep.join(
        filter(None, [str(Path(pipeline.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    return {**os.environ, "PYTHONPATH": path}


def last_line(text: str) -> str:
    """The last line that says something, cut to 300 characters."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")[:300]
