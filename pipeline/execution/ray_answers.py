"""Wait for what Ray works on; its errors in one line."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import ray

from pipeline.errors import EnvironmentFault, MedusaDistillError
from pipeline.execution.cluster_watch import ClusterWatch
from pipeline.execution.progress import ProgressReporter
from pipeline.execution.shard_progress import ShardProgress
from pipeline.storage.atomic import disk_errors
from pipeline.storage.progress_file import SECONDS_BETWEEN_REPORTS


def wait_for_one(
    references: Collection[Any],
    watch: ClusterWatch,
    progress: ProgressReporter | ShardProgress | None,
) -> Any:
    """Return the first reference whose result is there; meanwhile watch the cluster and show the
    progress.
    """
    while True:
        ready, _ = ray.wait(list(references), timeout=SECONDS_BETWEEN_REPORTS)
        watch.check()
        if progress:
            progress.poll()
        if ready:
            return ready[0]


def run_and_carry_errors(
    function: Callable[..., Any], arguments: dict[str, Any]
) -> tuple[Any, MedusaDistillError | None]:
    """Return (result, error): errors meant for the user cross process borders as values, not
    wrapped in Ray's own.
    """
    try:
        with disk_errors():
            result = function(**arguments)
    except MedusaDistillError as error:
        return None, error
    return result, None


def worker_died(error: Exception) -> EnvironmentFault:
    """Return the error for the user; `error` is Ray's."""
    fix = (
        "If memory ran out, use smaller batches or more GPUs. What was committed is kept; run it"
        " again."
    )
    return EnvironmentFault(f"A worker died: {last_line(error)}.", "Ray", fix)


def last_line(error: Exception) -> str:
    """Return the last line of an error's text, after Ray's own frames."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[-1].strip().rstrip(".")
