"""The fixture: fake CUDA devices for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_cuda.device import fake_cuda
from tests.fake_cuda.observer import Observer


@pytest.fixture
def on_fake_cuda() -> Iterator[Observer]:
    """The test runs on fake CUDA devices."""
    with fake_cuda() as observer:
        yield observer
