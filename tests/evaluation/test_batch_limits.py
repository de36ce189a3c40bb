"""The batch sizes at which a GPU's computation and memory run out."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("bytes_per_weight", [0.5, 1, 2])
def test_reading_takes_longer_than_computing_up_to_the_bound(name, bytes_per_weight):
    """The seconds of a step of a target of 7 billion weights."""
    gpu, weights = GPUS[name], 7e9
    reading = weights * bytes_per_weight / (gpu.bandwidth_gbs * 1e9)
    per_token = 2 * weights / (gpu.tflops * 1e12)
    tokens = memory_bound_tokens(gpu, bytes_per_weight)
    assert tokens * per_token <= reading < (tokens + 1) * per_token


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


@pytest.mark.parametrize(
    ("name", "units", "per_clock", "ghz", "bits", "gbps"),
    [
        ("NVIDIA A100-SXM4-40GB", 108, 2048, 1.41, 5120, 2.43),
        ("NVIDIA GeForce RTX 3090", 82, 512, 1.695, 384, 19.5),
        ("NVIDIA GeForce RTX 4090", 128, 512, 2.52, 384, 21),
    ],
)
def test_data_sheets_agree_with_the_chips_clocks(name, units, per_clock, ghz, bits, gbps):
    """Dense bfloat16 operations per clock and multiprocessor; memory's width and rate per pin."""
    gpu = GPUS[name]
    assert gpu.tflops == pytest.approx(units * per_clock * ghz / 1000, rel=0.01)
    assert gpu.bandwidth_gbs == pytest.approx(bits * gbps / 8, rel=0.01)


def test_settings_come_before_the_data_sheet_of_16_bits():
    here, given = PlacementConfig(), PlacementConfig(gpu_tflops=100, gpu_bandwidth_gbs=500)
    assert gpu_figures(here, "NVIDIA L4", HALF) == GpuFigures(121, 300)
    for name in (None, "NVIDIA L4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert gpu_figures(given, name, SINGLE) == GpuFigures(100, 500)
    assert gpu_figures(here, "NVIDIA L4", SINGLE) is None
    assert gpu_figures(here, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", HALF) is None
    assert gpu_figures(here, None, HALF) is None
