"""The batch sizes at which a GPU's computation and memory run out."""

from __future__ import annotations

from pipeline.config import PlacementConfig
from pipeline.evaluation.batch_limits import (
    GPUS,
    GpuFigures,
    gpu_figures,
    memory_bound_tokens,
    sequences_in_memory,
)
from pipeline.targets.sizes import TargetSizes

HALF = TargetSizes(parameters=7, linear=5, adapted=2, itemsize=2, stored_bits=16)
SINGLE = TargetSizes(parameters=7, linear=5, adapted=2, itemsize=4, stored_bits=32)


def test_the_bound_is_that_calculated_by_hand():
    """989.5 / 3.35 = 295.4 of an H100 and 312 / 2.039 = 153.02 of an A100, times bytes over two."""
    h100, a100 = GPUS["NVIDIA H100 80GB HBM3"], GPUS["NVIDIA A100-SXM4-80GB"]
    assert [memory_bound_tokens(h100, size) for size in (2, 1, 0.5)] == [295, 147, 73]
    assert memory_bound_tokens(a100, 2) == 153
    assert memory_bound_tokens(GpuFigures(67, 3350), 4) == 40, "float32"


def test_memory_holds_sequences_beside_the_weights():
    """A sequence of 4,096 tokens of Llama-7B has 2 x 32 x 4,096 x 4,096 numbers of 2 bytes: 2 GiB.
    80 GiB without 12.6 hold 33.7 of them.
    """
    weights, sequence = 2 * 6_738_415_616, 2 * 32 * 4096 * 4096 * 2
    assert sequence == 2 * 2**30
    assert sequences_in_memory(80 * 2**30, weights, sequence) == 33
    assert sequences_in_memory(8 * 2**30, weights, sequence) == 0


def test_settings_come_before_the_data_sheet_of_16_bits():
    here, given = PlacementConfig(), PlacementConfig(gpu_tflops=100, gpu_bandwidth_gbs=500)
    assert gpu_figures(here, "NVIDIA L4", HALF) == GpuFigures(121, 300)
    for name in (None, "NVIDIA L4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert gpu_figures(given, name, SINGLE) == GpuFigures(100, 500)
    assert gpu_figures(here, "NVIDIA L4", SINGLE) is None
    assert gpu_figures(here, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", HALF) is None
    assert gpu_figures(here, None, HALF) is None
