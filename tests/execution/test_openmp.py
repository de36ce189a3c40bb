"""How long torch's idle threads spin: said to OpenMP before torch loads, unless the user has said how."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline import OPENMP

OF_A_USER = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "77"}


@pytest.mark.parametrize(
    ("said", "understood"),
    [({}, OPENMP), *(({name: value}, {name: value}) for name, value in OF_A_USER.items())],
    ids=["by default", *OF_A_USER],
)
def test_torch_s_openmp_has_understood_how_long_to_spin(said, understood):
    """It reads them as it is loaded, here without the rest of torch."""
    (openmp,) = (Path(torch.__file__).parent / "lib").glob("libgomp*")
    environment = {name: value for name, value in os.environ.items() if name not in OPENMP}
    done = subprocess.run(
        [sys.executable, "-c", f"import pipeline, ctypes; ctypes.CDLL({str(openmp)!r})"],
        env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"} | said,
        capture_output=True,
        text=True,
        check=True,
    )
    found = dict(re.findall(r"(\w+) = '(.*)'", done.stderr.lower()))
    assert {name: found[name.lower()] for name in understood} == understood
    assert said == {} or found["gomp_spincount"] != OPENMP["GOMP_SPINCOUNT"]


@pytest.mark.slow
def test_the_tests_compute_with_one_thread_unless_told_otherwise():
    """Each worker of pytest-xdist has its own: more of them than cores wait for each other."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", "import tests.conftest, torch; print(torch.get_num_threads())"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
