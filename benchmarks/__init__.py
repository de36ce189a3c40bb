"""Benchmarks of the project's claims about speed and robustness: `python -m benchmarks.run`."""

import pipeline  # noqa: F401  (sets OpenMP's wait policy before torch loads)
