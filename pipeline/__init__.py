"""Medusa heads for any chat model, by self-distillation."""

import os

# OpenMP's idle threads spin for long and take the cores from their neighbours: beside one busy process on two cores the
# demo target trained at a fifth of its speed. Threads that sleep at once take, on cores of their own, two thirds longer
# to train it and three times as long to decode with it. So those of libgomp, torch's own, spin 10,000 times, which is
# some tenths of a millisecond; and, `passive`, not at all where there are more threads than cores. It is read when
# torch loads, here and in every process that is started.
OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}

if not OPENMP.keys() & os.environ.keys():
    os.environ.update(OPENMP)
