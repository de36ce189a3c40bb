"""Place a stage's workers on the CPU cores and GPUs of the cluster's nodes.

Ray would wait forever for resources that no node has. A placement that the cluster can never
schedule is therefore refused here; the error compares its CPU cores and GPUs with the nodes'.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import PlacementOf
from pipeline.errors import EnvironmentFault


@dataclass(frozen=True)
class Resources:
    """The CPU cores and GPUs to place workers on; `nodes` lists (cpus, gpus) per node."""

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
    """Place a stage's workers: fill in defaults, and check that all workers fit on the nodes.

    Raises:
        EnvironmentFault: The cluster can never schedule all workers.
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
    """Return the number of GPUs to place a worker on: as configured, or one if there are any."""
    if wanted.gpus_per_worker is None:
        return min(1, have.gpus)
    return wanted.gpus_per_worker


def workers_of(wanted: PlacementOf, have: Resources) -> int:
    """Return the number of workers to place; `auto` fills the cluster."""
    if wanted.workers == "auto":
        return max(1, most_workers(wanted, have))
    return wanted.workers


def most_workers(wanted: PlacementOf, have: Resources) -> int:
    """Return how many of a stage's workers the cluster can run at once.

    Without GPUs and without a configured number of cores, this is one per node: two workers on the
    same cores and in the same memory are no faster than one.
    """
    gpus = gpus_of(wanted, have)
    if not gpus and wanted.cpus_per_worker is None:
        return sum(cpus > 0 for cpus, _ in have.nodes)
    return _num_that_fit(have, wanted.cpus_per_worker or _cpus_per_worker(1, gpus, have), gpus)


def _cpus_per_worker(workers: int, gpus: int, have: Resources) -> int:
    """Return the default number of CPU cores to place a worker on.

    With GPUs, each worker gets its GPUs' share of the smallest node's cores. Without GPUs, all
    workers get an equal share.
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
    """Return how many workers of this size can be placed on the cluster's nodes at once."""
    room = 0
    for node_cpus, node_gpus in have.nodes:
        fits = node_cpus // cpus
        if gpus:
            fits = min(fits, node_gpus // gpus)
        room += fits
    return room
