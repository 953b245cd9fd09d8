"""The two readings of the rows J (T x P): their Gramian, and what weights make of them."""

import torch
from torch import Tensor

COLUMNS = 65_536
"""Columns that are worked on at once, where an intermediate result is as large as they are."""
SUMMED = 4096
"""Columns whose products are summed in their own dtype: float32 sums over more lose digits."""


def gramian_of(rows: Tensor) -> Tensor:
    """G = J Jᵀ (T, T) in float64 on the CPU, from rows (T, P) of any floating dtype and device.

    Products of 4096 columns are summed in float64: float32 rows cost about 1e-7 of |g_i| |g_j|, and
    not 2e-4 as one product over 1e7 columns does. Half-precision rows are multiplied in float32.
    """
    count, size = rows.shape
    total = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    for start in range(0, size, 64 * COLUMNS):
        block = rows[:, start : start + 64 * COLUMNS]
        if block.dtype in (torch.float16, torch.bfloat16):
            block = block.float()
        whole = block.shape[1] // SUMMED * SUMMED
        if whole:
            parts = block[:, :whole].unflatten(1, (-1, SUMMED)).transpose(0, 1)
            total += (parts @ parts.mT).sum(0, dtype=torch.float64)
        if whole < block.shape[1]:
            rest = block[:, whole:]
            total += rest @ rest.T
    return total.cpu()


def combined(rows: Tensor, weights: Tensor) -> Tensor:
    """Jᵀ w (P,) in the dtype and on the device of the rows."""
    dtype = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    weights = weights.to(rows.device, dtype)
    return (weights @ rows.to(dtype)).to(rows.dtype)
