"""The measured claims: each a ratio taken in one run, both sides in turns. `python -m
benchmarks.run`.
"""

import pipeline  # noqa: F401  (says how OpenMP is to wait, before torch loads)
