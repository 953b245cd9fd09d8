"""The two readings of the rows J (T x P): their Gramian, and what weights make of them."""

import torch
from torch import Tensor

COLUMNS = 65_536
"""Columns that are multiplied at once: float32 sums over more lose digits (2e-3 at P = 1e7)."""


def gramian_of(rows: Tensor) -> Tensor:
    """G = J Jᵀ (T, T) in float64 on the CPU, from rows (T, P) of any floating dtype and device.

    Products of 65,536 columns are summed in float64. Half-precision rows are multiplied in float32.
    """
    count, size = rows.shape
    total = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    for start in range(0, size, COLUMNS):
        part = rows[:, start : start + COLUMNS]
        if part.dtype in (torch.float16, torch.bfloat16):
            part = part.float()
        total += part @ part.T
    return total.cpu()


def combined(rows: Tensor, weights: Tensor) -> Tensor:
    """Jᵀ w (P,) in the dtype and on the device of the rows."""
    dtype = torch.float32 if rows.dtype in (torch.float16, torch.bfloat16) else rows.dtype
    weights = weights.to(rows.device, dtype)
    return (weights @ rows.to(dtype)).to(rows.dtype)
