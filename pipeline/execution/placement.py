"""Place a stage's workers on the CPU cores and GPUs of the cluster's nodes.

Ray waits forever for resources that no node has. Therefore a placement that the cluster can never
schedule is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import PlacementOf
from pipeline.errors import EnvironmentFault


@dataclass(frozen=True)
class Resources:
    """CPU cores and GPUs to place workers on; `nodes` has one pair (cpus, gpus) per node."""

    nodes: tuple[tuple[int, int], ...]

    @property
    def cpus(self) -> int:
        """The CPU cores of all nodes that workers can be placed on."""
        return sum(cpus for cpus, _ in self.nodes)

    @property
    def gpus(self) -> int:
        """The GPUs of all nodes that workers can be placed on."""
        return sum(gpus for _, gpus in self.nodes)


@dataclass(frozen=True)
class Placement:
    """The number of a stage's workers, and the CPU cores and GPUs of each."""

    workers: int
    cpus: int
    gpus: int


def place(stage: str, wanted: PlacementOf, have: Resources) -> Placement:
    """Fill in the defaults of a stage's placement, and check that all workers fit on the nodes.

    Raises:
        EnvironmentFault: The cluster can never run all workers at once.
    """
    gpus, workers = gpus_of(wanted, have), workers_of(wanted, have)
    cpus = wanted.cpus_per_worker or _cpus_per_worker(workers, gpus, have)
    fits = _num_that_fit(have, cpus, gpus)
    if fits < workers:
        need = f"{workers * cpus} CPU and {workers * gpus} GPU"
        nodes = "; ".join(f"{c} CPU and {g} GPU" for c, g in have.nodes)
        raise EnvironmentFault(
            f"The cluster cannot place {stage}: {workers} worker(s) of {cpus} CPU and {gpus} GPU"
            f" need {need}, each worker on one node; the {len(have.nodes)} node(s) have {nodes}:"
            f" room for {fits}.",
            f"placement.{stage}",
            "Ask for less, or start a larger cluster.",
        )
    return Placement(workers, cpus, gpus)


def gpus_of(wanted: PlacementOf, have: Resources) -> int:
    """Return the GPUs per worker: as configured, else 1 if the cluster has GPUs and 0 if not."""
    if wanted.gpus_per_worker is None:
        return min(1, have.gpus)
    return wanted.gpus_per_worker


def workers_of(wanted: PlacementOf, have: Resources) -> int:
    """Return the number of workers: as configured, or for `auto` as many as fit, at least 1."""
    if wanted.workers == "auto":
        return max(1, most_workers(wanted, have))
    return wanted.workers


def most_workers(wanted: PlacementOf, have: Resources) -> int:
    """Return how many of a stage's workers the cluster can run at once.

    If workers have no GPUs and no configured number of cores, this is one per node: two workers on
    the same cores and in the same memory are no faster than one.
    """
    gpus = gpus_of(wanted, have)
    if not gpus and wanted.cpus_per_worker is None:
        return sum(cpus > 0 for cpus, _ in have.nodes)
    return _num_that_fit(have, wanted.cpus_per_worker or _cpus_per_worker(1, gpus, have), gpus)


def _cpus_per_worker(workers: int, gpus: int, have: Resources) -> int:
    """Return the default number of CPU cores per worker, at least 1.

    With GPUs, a node's cores are divided by the number of workers that its GPUs allow, and the
    smallest result of all nodes is used. Without GPUs, all workers get an equal share of the cores.
    """
    if gpus:
        shares = []
        for node_cpus, node_gpus in have.nodes:
            if node_gpus >= gpus:
                shares.append(node_cpus // (node_gpus // gpus))
        return max(1, min(shares, default=1))
    for cpus in range(have.cpus // workers, 1, -1):
        if _num_that_fit(have, cpus, 0) >= workers:
            return cpus
    return 1


def _num_that_fit(have: Resources, cpus: int, gpus: int) -> int:
    """Return how many workers with these CPU cores and GPUs the nodes can run at once."""
    room = 0
    for node_cpus, node_gpus in have.nodes:
        fits = node_cpus // cpus
        if gpus:
            fits = min(fits, node_gpus // gpus)
        room += fits
    return room
