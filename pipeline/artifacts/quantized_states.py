"""Hidden states quantized to 8 bits, with one float32 scale per state.

A state is divided by its scale, which maps the state's largest magnitude to the largest number of
the format. fp8 (e4m3: four bits of exponent, three of mantissa) rounds each number by at most one
part in 16, and those below 2⁻⁶ of the scale to a multiple of 2⁻⁹ of it. Reading rounds once more,
to the target's dtype.

Letters: N states, D hidden size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SCALE_BYTES = 4
STORED_DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
SMALLEST_STATE = 1e-30  # lower bound of a state's largest number, so that no float32 overflows
PIECE = 1 << 18  # numbers to convert at once, few enough to stay in a core's cache


def quantize(hidden_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize states [N, D] to the dtype STORED_DTYPE, with one float32 scale per state [N]."""
    stored_ND = torch.empty(hidden_ND.shape, dtype=STORED_DTYPE)
    scales_N = torch.empty(len(hidden_ND))
    rows = max(1, PIECE // hidden_ND.shape[1])
    for start in range(0, len(hidden_ND), rows):
        piece_ND = hidden_ND[start : start + rows].to(torch.float32, copy=True)
        largest_N = piece_ND.abs().amax(dim=1).clamp_min(SMALLEST_STATE)
        scales_N[start : start + rows] = largest_N / LARGEST
        piece_ND.mul_((LARGEST / largest_N)[:, None])
        stored_ND[start : start + rows] = piece_ND.to(STORED_DTYPE)
    return stored_ND, scales_N


def dequantize(
    stored_ND: npt.NDArray[np.uint8],
    scales_N: npt.NDArray[np.float32],
    dtype: torch.dtype,
) -> Tensor:
    """Return states [N, D] in `dtype` from their stored bytes and scales."""
    # A table is faster: torch converts float8 one number at a time.
    numbers = torch.arange(256, dtype=torch.uint8).view(STORED_DTYPE).float().numpy()
    hidden_ND = torch.from_numpy(numbers.take(stored_ND))
    return hidden_ND.mul_(torch.tensor(scales_N[:, None])).to(dtype)
