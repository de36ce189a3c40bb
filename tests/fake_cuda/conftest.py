"""The fixture: fake CUDA devices for a test."""

from __future__ import annotations

import pytest

from tests.fake_cuda.device import compile_guard, fake_cuda


@pytest.fixture
def on_fake_cuda(shared):
    """The test runs on fake CUDA devices."""
    with fake_cuda(shared("fake-cuda", compile_guard)) as observer:
        yield observer
