"""The commands as a shell calls them, in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.errors import STOPS


@dataclass(frozen=True)
class Ended:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that a command replaces; nohup may have had one ignored."""
    handlers = {signum: signal.signal(signum, signal.SIG_DFL) for signum in STOPS}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """`command("status", path)`: exit code, stdout, stderr."""

    def call(*words: object) -> Ended:
        capsys.readouterr()
        code = ends_well(lambda: app([str(word) for word in words], standalone_mode=False))
        return Ended(code, *capsys.readouterr())

    return call
