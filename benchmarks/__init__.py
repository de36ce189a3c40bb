"""Measured claims, each a ratio of two sides in one run: `python -m benchmarks.run`."""

import pipeline  # noqa: F401  (says how OpenMP is to wait, before torch loads)
