"""How long torch's idle threads spin: said to OpenMP before torch loads, unless the user has said how."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pipeline import OPENMP


@pytest.mark.parametrize(
    ("said", "understood"),
    [({}, OPENMP), ({"OMP_WAIT_POLICY": "active"}, {"OMP_WAIT_POLICY": "active"})],
    ids=["by default", "by the user"],
)
def test_torch_s_openmp_has_understood_how_long_to_spin(said, understood):
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
    done = subprocess.run(
        [sys.executable, "-c", "import pipeline, torch"],
        env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"} | said,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split("'") for line in done.stderr.splitlines() if "=" in line]
    found = {name.split()[-2]: value for name, value, _ in lines}  # [host] NAME = 'value'
    for name, value in understood.items():
        assert found[name].lower() == value
    assert ("GOMP_SPINCOUNT" in understood) == (found["GOMP_SPINCOUNT"] == OPENMP["GOMP_SPINCOUNT"])
