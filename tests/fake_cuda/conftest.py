"""The fixture: fake CUDA devices for a test."""

from __future__ import annotations

import pytest

from tests.fake_cuda.device import fake_cuda


@pytest.fixture
def on_fake_cuda():
    """The test runs on fake CUDA devices."""
    with fake_cuda() as observer:
        yield observer
