"""The commands as a shell calls them, in this process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well


@dataclass(frozen=True)
class Ended:
    """The exit code and output of a command."""

    code: int
    out: str
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """`command("status", path)`: exit code, stdout, stderr."""
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

    def call(*words: object) -> Ended:
        capsys.readouterr()
        code = ends_well(lambda: app([str(word) for word in words], standalone_mode=False))
        return Ended(code, *capsys.readouterr())

    yield call
    for name, handler in handlers.items():
        signal.signal(name, handler)


@pytest.fixture
def config_file(tmp_path: Path, make_settings) -> Path:
    """A configuration of a tiny run at `tmp_path/run`, as a YAML file."""
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(make_settings(tmp_path)))
    return path
