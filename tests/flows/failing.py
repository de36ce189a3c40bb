"""A flow that is to end badly: run as the command runs it, beside a finished run whose every byte
must be as it was.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest
import yaml

from pipeline.cli.app import app
from pipeline.cli.ending import ends_well
from pipeline.storage.run_directory import RunDirectory

Run = Callable[..., str]


@pytest.fixture
def signals_as_they_were() -> Iterator[None]:
    interrupt, terminate = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, terminate)


@pytest.fixture
def run_fails(tmp_path, make_settings, capsys, signals_as_they_were) -> Run:
    """`run_fails(code, *words, **changes)`: the paragraph that `run` ends with."""

    def fail(code: int, *words: str, **changes: object) -> str:
        (tmp_path / "bad.yaml").write_text(yaml.safe_dump(make_settings(tmp_path, **changes)))
        capsys.readouterr()
        line = ["run", str(tmp_path / "bad.yaml"), "--executor", "inline", *words]
        ended = ends_well(lambda: app(line, standalone_mode=False))
        said = capsys.readouterr().err
        assert ended == code, said
        return one_paragraph(said)

    return fail


def one_paragraph(said: str) -> str:
    told = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(told) == 1 and "Traceback" not in said and len(told[0]) < 700, said
    assert said.rstrip().endswith(told[0].rstrip()), "it is the last that is said"
    return told[0].removeprefix("error: ")


def committed(run: RunDirectory) -> dict[str, bytes]:
    """Every file of every stage that was finished."""
    stages = [path.parent for path in run.path.glob("*/DONE.json")]
    return {
        str(file.relative_to(run.path)): file.read_bytes()
        for stage in stages
        for file in stage.rglob("*")
        if file.is_file() and file.name not in ("lock", "upstream.json", "DONE.json", "README.md")
    }


@pytest.fixture
def intact(copied_run) -> Iterator[RunDirectory]:
    """A finished run; when the test is over, all of it is still there, and still whole."""
    before = committed(copied_run)
    assert before
    yield copied_run
    after = committed(copied_run)
    assert {name: after.get(name) for name in before} == before
