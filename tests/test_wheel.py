"""The wheel holds what the commands read, and works outside a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeline.config.load import BUNDLED

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "pipeline"
PROJECT = "medusa_distill"
BUILD = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of this checkout, unpacked."""
    copy = tmp_path_factory.mktemp("copy")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("pipeline", "configs", "data"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignored)
    built = tmp_path_factory.mktemp("built")
    subprocess.run([sys.executable, *BUILD, "-w", str(built), str(copy)], check=True)
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    return site


@pytest.mark.slow
def test_wheel_holds_every_file_of_the_package(installed):
    """Links are followed; the demo's configurations need a checkout."""
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"pipeline", PROJECT}
    missing = []
    for folder, folders, names in os.walk(PACKAGE, followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            file = Path(folder, name)
            copy = installed / file.relative_to(ROOT)
            if name.startswith("demo"):
                assert not copy.exists(), name
            elif not copy.is_file() or copy.read_bytes() != file.read_bytes():
                missing.append(name)
    assert missing == []


@pytest.mark.slow
def test_bundled_names_load_from_the_wheel(installed, tmp_path):
    """Also a configuration that reads a chat template."""
    names = [file.stem for file in BUNDLED.glob("*.yaml") if not file.name.startswith("demo")]
    assert "vicuna-7b" in names
    code = "import sys, pipeline; list(map(pipeline.load_config, sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    subprocess.run([sys.executable, "-c", code, *names], cwd=tmp_path, env=environment, check=True)
