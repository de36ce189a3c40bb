"""Call a function in a new Python process, so that vLLM changes nothing in this one.

The function, its task and its result are pickled. The new process writes its progress to a
`ProgressFile`, which the waiting caller reads twice a second.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.errors import EnvironmentFault, MedusaDistillError
from pipeline.storage.progress_file import SECONDS_BETWEEN_REPORTS, ProgressFile
from pipeline.targets.spec import last_line

Report = Callable[..., None]  # receives the fields of `Progress`
CALL, RESULT, PROGRESS = "call.pickle", "result.pickle", "progress.json"


def in_own_process(
    function: Callable[[Any, Report], Any], task: object, on_report: Report | None = None
) -> Any:
    """Call `function(task, report)` in a new process, and return its result.

    Args:
        function: A module-level function, since it is pickled.
        task: Any object that can be pickled.
        on_report: Called about twice a second with the keyword arguments of the function's last
            call of `report`.

    Raises:
        MedusaDistillError: The function raised it.
        EnvironmentFault: The process ended without a result, for example after another exception.
    """
    with tempfile.TemporaryDirectory(prefix="vllm-") as directory:
        Path(directory, CALL).write_bytes(pickle.dumps((function, task)))
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, directory],
            env=environment(directory),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        output = _wait_for_process(process, ProgressFile(Path(directory, PROGRESS)), on_report)
        result = Path(directory, RESULT)
        if not result.is_file():
            reason = last_line(output or "no output")
            raise EnvironmentFault(
                f"vLLM ended with status {process.returncode}: {reason}",
                "check.engines: vllm",
                "Free memory, or take vllm out of check.engines.",
            )
        outcome = pickle.loads(result.read_bytes())
    if isinstance(outcome, MedusaDistillError):
        raise outcome
    return outcome


def _wait_for_process(
    process: subprocess.Popen[str], file: ProgressFile, on_report: Report | None
) -> str:
    """Wait for a process and return its standard error; pass its progress to `on_report`.

    If an exception is raised meanwhile, the process is killed.
    """
    with process:
        try:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    _, output = process.communicate(timeout=SECONDS_BETWEEN_REPORTS)
                    return output
                progress = file.read()
                if on_report and progress:
                    on_report(**progress)
        except BaseException:
            process.kill()
            raise


def main(directory: str) -> None:
    """Run the pickled function in `directory`, and write its result or MedusaDistillError there.

    Any other exception ends the process without a result.
    """
    file = ProgressFile(Path(directory, PROGRESS))

    def report(**progress: Any) -> None:
        """Write the progress to the file that the caller reads."""
        file.write(progress, at_once="done" not in progress)  # a new part is written at once

    function, task = pickle.loads(Path(directory, CALL).read_bytes())
    try:
        outcome = function(task, report)
    except MedusaDistillError as error:
        outcome = error
    Path(directory, RESULT).write_bytes(pickle.dumps(outcome))
    gc.freeze()  # else Python goes through all of vLLM's objects as it ends, which takes 2 s


def environment(sockets: str) -> dict[str, str]:
    """Return environment variables for a process that imports the same packages as this one.

    `sockets` is the directory of vLLM's sockets, unless this process already has one. vLLM reports
    no usage, unless this process asks for it.
    """
    own = {"VLLM_RPC_BASE_PATH": sockets, "VLLM_NO_USAGE_STATS": "1"}
    return {**own, **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


if __name__ == "__main__":
    main(sys.argv[1])
