"""One environment holds one build, and `make` knows which."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
Make = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(installed, *words)` in a copy whose environment holds that build already."""
    for path in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("requirements-*.lock")):
        shutil.copy(path, tmp_path)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("ACCELERATOR", "MAKEFLAGS")
    }

    def run(installed: str, *words: str) -> subprocess.CompletedProcess:
        (tmp_path / ".venv").mkdir()
        (tmp_path / f".venv/.installed-{installed}").touch()
        return subprocess.run(
            ["make", *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return run


@pytest.mark.parametrize(("installed", "asked"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_another_build_is_not_installed_over_the_present_one(make, tmp_path, installed, asked):
    ended = make(installed, "install", f"ACCELERATOR={asked}")
    assert (
        ended.returncode == 2
        and f"holds the {installed} build" in ended.stdout
        and "rm -rf .venv" in ended.stdout
    )
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == [f".installed-{installed}"]


@pytest.mark.parametrize("installed", ["cpu", "cuda"])
def test_without_a_word_the_build_that_is_there_stays(make, installed):
    ended = make(installed, "--dry-run", "test")
    assert ended.returncode == 0 and "install" not in ended.stdout and "pytest" in ended.stdout


@pytest.mark.parametrize(
    ("words", "demo"),
    [
        ((), "medusa-1"),
        (("METHOD=medusa-2",), "medusa-2"),
        (("HEADS=recurrent",), "recurrent"),
        (
            ("HEADS=recurrent", "METHOD=medusa-2"),
            "recurrent with medusa-2",
        ),  # which there is none of, and is refused
    ],
)
def test_the_demo_has_the_given_kind_and_method(make, words, demo):
    assert f'flows/demo.py "{demo}"' in make("cpu", "--dry-run", "demo", *words).stdout
