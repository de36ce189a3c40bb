"""Run the benchmarks and write their results.

    python -m benchmarks.run                 # all but the long ones: `make bench`
    python -m benchmarks.run features train  # some
    python -m benchmarks.run --tiny          # a smoke test; figures are meaningless and not kept

Each benchmark runs in its own process, and needs an otherwise idle machine. A missed aim is not a
failure: the exit code is 1 only if a benchmark crashed.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.claims import Result
from benchmarks.results import DIRECTORY, one_line, write_index, write_result

NEEDS_GPU = "gpu"
BENCHMARKS = {
    "generate": "conversation-wise generation, over one call per turn",
    "features": "the features stage, over the bare forward",
    "writing": "writing the cache of states",
    "train": "training from the cache, over computing states online",
    "head_loss": "a head's loss in chunks with a large vocabulary",
    "attention": "attention of EAGLE-3 heads in training, and their decoding steps",
    "architectures": "families of models, kept or refused (10 minutes)",
    NEEDS_GPU: "features, training and decoding of a target of Mistral-7B's shape; needs a GPU",
    "ladder": "recipes compared on one target; needs `make demo`, or `benchmarks.ladder CONFIG`",
    "recipe": "what `auto` chooses, against a grid (50 minutes)",
    "soak": "kills and resumes (10 minutes)",
}
# too long to run by default, or dependent on other work such as the demos
WHEN_ASKED = {"architectures", "soak", "ladder", "recipe"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named benchmarks, or the default ones; return 1 if any crashed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.run", description="Measure the claims about speed."
    )
    names = f"of {', '.join(BENCHMARKS)}; default: all but {' and '.join(sorted(WHEN_ASKED))}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=names)
    parser.add_argument(
        "--tiny", action="store_true", help="a smoke test; figures are meaningless and not kept"
    )
    asked = parser.parse_args(arguments)
    if unknown := sorted(set(asked.names) - set(BENCHMARKS)):
        parser.error(
            f"there is no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}"
        )
    if len(asked.names) == 1:
        run_one(asked.names[0], tiny=asked.tiny)
        return 0
    chosen = asked.names or [name for name in BENCHMARKS if name not in WHEN_ASKED]
    crashed = [name for name in chosen if not _in_own_process(name, tiny=asked.tiny)]
    if crashed:
        print(
            f"crashed: {', '.join(crashed)}; their results are as they were before", file=sys.stderr
        )
    return min(1, len(crashed))


def run_one(name: str, *, tiny: bool = False) -> None:
    """Run a benchmark in this process, print its claims and, unless `tiny`, write the result.

    The benchmark `gpu` is skipped without a GPU, unless `tiny`.
    """
    import torch

    if name == NEEDS_GPU and not tiny and not torch.cuda.is_available():
        print(f"{name}: not measured, this machine has no GPU", flush=True)
        write_index(DIRECTORY, BENCHMARKS)
    else:
        started = time.perf_counter()
        result = importlib.import_module(f"benchmarks.{name}").measure(tiny=tiny)
        keep(name, result, time.perf_counter() - started, tiny=tiny)


def keep(name: str, result: Result, seconds: float, *, tiny: bool = False) -> None:
    """Print a benchmark's claims and, unless `tiny`, write the result and the index."""
    memory = _peak_memory_gb()
    for claim in result.claims:
        print(f"{name}: {one_line(claim)}")
    for what in result.not_measured:
        print(f"{name}: {what}: not measured, its time was over")
    print(
        f"{name}: {seconds:.0f} s, {memory:.1f}"
        f" GB{' (tiny: figures mean nothing)' if tiny else ''}",
        flush=True,
    )
    if not tiny:
        write_result(DIRECTORY, name, result, seconds, memory)
        write_index(DIRECTORY, BENCHMARKS)


def _in_own_process(name: str, *, tiny: bool) -> bool:
    """Run a benchmark in its own process; return whether it succeeded.

    So it is not affected by threads, memory and settings that another benchmark leaves behind.
    """
    command = [sys.executable, "-m", "benchmarks.run", name, *(["--tiny"] if tiny else [])]
    return subprocess.run(command, check=False).returncode == 0


def _peak_memory_gb() -> float:
    """Return the peak RAM of this process or of one of its children, the larger one, in GB."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(one).ru_maxrss for one in who) * 1024 / 1e9


if __name__ == "__main__":
    sys.exit(main())
