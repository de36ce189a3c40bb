"""A GPU's peak figures, by the settings or by its data sheet."""

from __future__ import annotations

from pipeline.config import PlacementConfig
from pipeline.evaluation.gpu_figures import GpuFigures, gpu_figures
from pipeline.targets.sizes import TargetSizes

HALF = TargetSizes(parameters=7, linear=5, adapted=2, itemsize=2, stored_bits=16)
SINGLE = TargetSizes(parameters=7, linear=5, adapted=2, itemsize=4, stored_bits=32)


def test_settings_come_before_the_data_sheet_of_16_bits():
    here, given = PlacementConfig(), PlacementConfig(gpu_tflops=100, gpu_bandwidth_gbs=500)
    assert gpu_figures(here, "NVIDIA L4", HALF) == GpuFigures(121, 300)
    for name in (None, "NVIDIA L4", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert gpu_figures(given, name, SINGLE) == GpuFigures(100, 500)
    assert gpu_figures(here, "NVIDIA L4", SINGLE) is None
    assert gpu_figures(here, "NVIDIA H100 80GB HBM3 MIG 1g.10gb", HALF) is None
    assert gpu_figures(here, None, HALF) is None
