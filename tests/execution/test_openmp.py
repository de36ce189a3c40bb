"""The spin time of OpenMP's idle threads is set before torch loads, unless the user set it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline import OPENMP


@pytest.mark.parametrize(
    "users", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "77"}], ids=str
)
def test_torchs_openmp_understands_how_long_to_spin(users):
    """OpenMP reads the variables when it is loaded."""
    (openmp,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
    command = [sys.executable, "-c", f"import pipeline, ctypes; ctypes.CDLL({str(openmp)!r})"]
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **users}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = dict(re.findall(r"(\w+) = '(.*)'", done.stderr.lower()))
    for name, value in (users or OPENMP).items():
        assert found[name.lower()] == value
    assert not users or found["gomp_spincount"] != OPENMP["GOMP_SPINCOUNT"]
