"""What the fault tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.register_assert_rewrite("tests.faults.unfinished", "tests.faults.processes")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A cluster that the runs of a module share, as they would share one that RAY_ADDRESS names."""
    from pipeline.execution.ray_executor import RayExecutor

    executor = RayExecutor()
    yield
    executor.close()
