"""Benchmarks of claims, each a ratio of two sides in one run: `python -m benchmarks.run`."""

import pipeline  # noqa: F401  (sets OpenMP's wait policy before torch loads)
