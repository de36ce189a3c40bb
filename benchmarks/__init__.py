"""The measured claims: each a ratio taken in one run, both sides in turns. `python -m benchmarks.run`."""
