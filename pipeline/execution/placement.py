"""How many workers a stage gets and what each may use; refused up front when the cluster can never fit it.

Ray would wait forever for resources that no node has, so the sum is done here, in words that a person can follow.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import PlacementOf
from pipeline.errors import EnvironmentFault


@dataclass(frozen=True)
class Resources:
    """What the machine or the cluster has; `nodes` lists (cpus, gpus) of each node."""

    nodes: tuple[tuple[int, int], ...]

    @property
    def cpus(self) -> int:
        return sum(cpus for cpus, _ in self.nodes)

    @property
    def gpus(self) -> int:
        return sum(gpus for _, gpus in self.nodes)


@dataclass(frozen=True)
class Placement:
    """What a stage's workers get: their number, and CPU cores and GPUs of each."""

    workers: int
    cpus: int
    gpus: int


def place(stage: str, wanted: PlacementOf, have: Resources) -> Placement:
    """Fill in the defaults and check that every worker fits on some node.

    Raises:
        EnvironmentFault: The cluster can never schedule it; the sum is spelled out.
    """
    gpus = wanted.gpus_per_worker if wanted.gpus_per_worker is not None else min(1, have.gpus)
    if wanted.cpus_per_worker is not None:
        cpus = wanted.cpus_per_worker
    elif gpus:
        cpus = max(
            1,
            min(cpus // max(1, node_gpus // gpus) for cpus, node_gpus in have.nodes if node_gpus >= gpus)
            if any(g >= gpus for _, g in have.nodes)
            else 1,
        )
    else:
        cpus = max(1, have.cpus // wanted.workers)
    fits = sum(
        min(node_cpus // cpus, node_gpus // gpus if gpus else wanted.workers) for node_cpus, node_gpus in have.nodes
    )
    if fits < wanted.workers:
        need = f"{wanted.workers * cpus} CPU and {wanted.workers * gpus} GPU"
        nodes = "; ".join(f"{c} CPU and {g} GPU" for c, g in have.nodes)
        raise EnvironmentFault(
            f"The cluster cannot place {stage}: {wanted.workers} worker(s) of {cpus} CPU and {gpus} GPU need {need}, "
            f"each worker on one node; the {len(have.nodes)} node(s) have {nodes}: room for {fits}.",
            f"placement.{stage}",
            "Ask for less, or start a larger cluster.",
        )
    return Placement(wanted.workers, cpus, gpus)
