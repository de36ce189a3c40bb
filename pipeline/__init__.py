"""Medusa heads for any chat model, by self-distillation; `__all__` lists the public Python API.

A name is imported when it is first used, so that `import pipeline` does not load torch.
docs/python.md describes the public names; anything else in this package may change without notice.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# Idle OpenMP threads spin for a long time and take cores from other processes: beside one busy
# process on two cores, the demo target trained at a fifth of its speed. Threads that never spin are
# slow even on free cores: training takes two thirds longer, decoding three times as long. So the
# threads of libgomp, which torch uses, spin 10,000 times (some tenths of a millisecond) and, with
# `passive`, not at all where there are more threads than cores. The variables are read when torch
# loads, here and in every child process.
OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "10000"}

if not OPENMP.keys() & os.environ.keys():
    os.environ.update(OPENMP)

if TYPE_CHECKING:
    from pipeline.api.models import Export, Target, load_export, load_heads, load_target, load_tree
    from pipeline.api.runs import Run, open_run, run_flow
    from pipeline.config import Config
    from pipeline.config.load import load_config
    from pipeline.decoding.acceptance import acceptance_rule
    from pipeline.decoding.decoder import Decoded, Decoder, acceleration_rate
    from pipeline.decoding.dynamic_tree import DynamicTree
    from pipeline.errors import MedusaDistillError

__all__ = [
    "Config",
    "Decoded",
    "Decoder",
    "DynamicTree",
    "Export",
    "MedusaDistillError",
    "Run",
    "Target",
    "acceleration_rate",
    "acceptance_rule",
    "load_config",
    "load_export",
    "load_heads",
    "load_target",
    "load_tree",
    "open_run",
    "run_flow",
]

# Where the names are looked up, in this order: the modules that import no torch come first.
_MODULES = (
    "pipeline.errors",
    "pipeline.config",
    "pipeline.config.load",
    "pipeline.decoding.acceptance",
    "pipeline.decoding.decoder",
    "pipeline.decoding.dynamic_tree",
    "pipeline.api.models",
    "pipeline.api.runs",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in map(importlib.import_module, _MODULES):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
