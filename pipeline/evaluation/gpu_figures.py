"""The peak figures of GPUs, by their data sheets or the settings.

No program reaches these figures. Products are taken to have 16 bits, also the products of quantized
weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.running import PlacementConfig
from pipeline.targets.sizes import TargetSizes


@dataclass(frozen=True)
class GpuFigures:
    """The peak figures of a GPU in the target's dtype, without sparsity."""

    tflops: float  # 10^12 operations per second
    bandwidth_gbs: float  # 10^9 bytes per second


GPUS = {
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/a100-80gb-datasheet-update-nvidia-us-1521051-r2-web.pdf
    "NVIDIA A100-SXM4-40GB": GpuFigures(312, 1555),
    "NVIDIA A100-PCIE-40GB": GpuFigures(312, 1555),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
    "NVIDIA A100-SXM4-80GB": GpuFigures(312, 2039),
    "NVIDIA A100 80GB PCIe": GpuFigures(312, 1935),
    # https://www.nvidia.com/en-us/data-center/h100/ (SXM; 1,979 with sparsity)
    "NVIDIA H100 80GB HBM3": GpuFigures(989.5, 3350),
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (1,513)
    "NVIDIA H100 PCIe": GpuFigures(756.5, 2000),
    # https://www.nvidia.com/en-us/data-center/h200/ (SXM; 1,979 with sparsity)
    "NVIDIA H200": GpuFigures(989.5, 4800),
    # https://resources.nvidia.com/en-us-blackwell-architecture (HGX B200; 4,500 with sparsity)
    # 7,680 bits at 8 Gbit/s: https://github.com/pytorch/ao/pull/4002 (DGX B200's page: 8 TB/s)
    "NVIDIA B200": GpuFigures(2250, 7700),
    # https://www.nvidia.com/en-us/data-center/l4/ (242 with sparsity)
    "NVIDIA L4": GpuFigures(121, 300),
    # https://www.nvidia.com/en-us/data-center/l40s/
    "NVIDIA L40S": GpuFigures(362.05, 864),
    # https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf
    # (140 with sparsity; the A10, another board, has 125)
    "NVIDIA A10G": GpuFigures(70, 600),
    # https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
    "NVIDIA GeForce RTX 4090": GpuFigures(165.2, 1008),
    # https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf
    "NVIDIA GeForce RTX 3090": GpuFigures(71, 936),
    # https://www.amd.com/content/dam/amd/en/documents/instinct-tech-docs/data-sheets/amd-instinct-mi300x-data-sheet.pdf
    "AMD Instinct MI300X": GpuFigures(1307.4, 5300),
}
"""Data-sheet figures by torch's name of the GPU, in bfloat16 with float32 sums.

Those of float16 are the same. A data sheet that states figures with sparsity states twice as many
operations per second; such a figure is in brackets.
"""


def gpu_figures(
    placement: PlacementConfig, name: str | None, target: TargetSizes
) -> GpuFigures | None:
    """Return the figures of a GPU, from the settings or else from its data sheet.

    Args:
        name: The name that torch states; None for a GPU that is elsewhere.

    Returns:
        None if the settings have no figures, and the name is not in `GPUS` or the target's dtype
        has not 16 bits.
    """
    if placement.gpu_tflops is not None and placement.gpu_bandwidth_gbs is not None:
        return GpuFigures(placement.gpu_tflops, placement.gpu_bandwidth_gbs)
    if name is None or target.itemsize != 2:
        return None
    return GPUS.get(name)
