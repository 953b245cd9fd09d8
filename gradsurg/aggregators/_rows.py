"""The two readings of the rows J (T x P): their Gramian, and what weights make of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor

COLUMNS = 65_536
"""Columns that are worked on at once, where an intermediate result is as large as they are."""
SUMMED = 4096
"""Columns whose products are summed in their own dtype: float32 sums over more lose digits."""

HALVES = (torch.float16, torch.bfloat16)


def gramian_of(blocks: Sequence[Tensor]) -> Tensor:
    """G = J Jᵀ (T, T) in float64 on the CPU, from the blocks (T, p) of J, of any floating dtype and
    device.

    Products of at most 4096 columns are summed in float64: float32 rows cost about 1e-7 of
    |g_i| |g_j|, and not 2e-4 as one product over 1e7 columns does. Where a solution would make more
    than 1e-6 of that, all is multiplied in float64 instead, which takes three times as long more.
    Half-precision rows are multiplied in float32. In float32, rows with norms below 1e-19 have
    products of 0, and above 1e19 of infinity.
    """
    gramian = _sum_over(blocks, _in_their_dtype)
    exact = all(rows.dtype == torch.float64 for rows in blocks)
    return gramian if exact or not _nearly_dependent(gramian) else _sum_over(blocks, _in_float64)


def _sum_over(blocks: Sequence[Tensor], pieces_of: Callable[[Tensor], Iterable[Tensor]]) -> Tensor:
    return reduce(add, (reduce(add, map(_product, pieces_of(rows))).cpu() for rows in blocks))


def _in_their_dtype(rows: Tensor) -> Sequence[Tensor]:
    """The rows as they are, but a copy in float32 of some columns at a time."""
    return rows.split(64 * COLUMNS, dim=1) if rows.dtype in HALVES else [rows]


def _in_float64(rows: Tensor) -> Iterator[Tensor]:
    """A copy of some columns at a time: as many as a cache holds, or as are worth a launch."""
    columns = COLUMNS if rows.device.type == "cpu" else 64 * COLUMNS
    return (part.double() for part in rows.split(columns, dim=1))


def _nearly_dependent(gramian: Tensor) -> bool:
    """Whether the cosines' least eigenvalue makes of an error in G ten times as much."""
    if len(gramian) == 2:  # it is 1 - |cosine|
        (first, inner), (_, second) = gramian.tolist()
        return inner * inner > 0.81 * first * second
    # NumPy, for so small a matrix in a quarter of the time.
    matrix = gramian.numpy()
    norms = np.sqrt(matrix.diagonal())
    with np.errstate(all="ignore"):
        cosines = (matrix / np.outer(norms, norms))[norms > 0][:, norms > 0]
    if not cosines.size or not np.isfinite(cosines).all():
        return False
    return bool(np.linalg.eigvalsh(cosines)[0] < 0.1)


def _product(block: Tensor) -> Tensor:
    block = wide(block)
    summed = SUMMED // len(block) if len(block) < 8 else SUMMED  # few stay in the first cache
    whole = block.shape[1] // summed * summed
    rest = block[:, whole:]
    product = (rest @ rest.T).double()
    if not whole:
        return product
    parts = block[:, :whole].unflatten(1, (-1, summed)).transpose(0, 1)
    if len(block) != 2:
        return product + torch.bmm(parts, parts.mT).sum(0, dtype=torch.float64)
    # A matrix product knows of no symmetry: of two rows, it makes four products where three do.
    first, second = parts.split(1, dim=1)
    left = torch.bmm(parts, first.mT).sum(0, dtype=torch.float64)
    last = torch.bmm(second, second.mT).sum(0, dtype=torch.float64)
    return product + torch.cat([left, torch.cat([left[1:], last])], dim=1)


def combined_safely(blocks: Sequence[Tensor], weights: Tensor, gramian: Tensor) -> list[Tensor]:
    """Jᵀ w (p,) of each block of J, whose Gramian is known: in float64 where the rows cancel."""
    own, matrix = weights.numpy(), gramian.numpy()
    with np.errstate(all="ignore"):
        cancels = (abs(own) @ np.sqrt(matrix.diagonal())) ** 2 > 64 * max(own @ matrix @ own, 0.0)
    return [(_combined_exactly if cancels else combined)(rows, weights) for rows in blocks]


def _combined_exactly(rows: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(rows.device)
    return torch.cat([(weights @ part).to(rows.dtype) for part in _in_float64(rows)])


def combined(rows: Tensor, weights: Tensor) -> Tensor:
    """Jᵀ w (P,) in the dtype and on the device of the rows."""
    given, rows = rows, wide(rows)
    weights = weights.to(rows)
    whole = rows.shape[1] // COLUMNS * COLUMNS
    if not whole or rows.device.type != "cpu" or torch.get_num_threads() == 1:
        return (weights @ rows).to(given.dtype)
    # A CPU has one thread for a product of a vector, and all of them for a batch of such products.
    result = rows.new_empty(rows.shape[1])
    parts = rows[:, :whole].unflatten(1, (-1, COLUMNS)).transpose(0, 1)
    below = result[:whole].view(-1, 1, COLUMNS)
    torch.bmm(weights.expand(len(parts), 1, -1), parts, out=below)
    torch.mv(rows[:, whole:].T, weights, out=result[whole:])
    return result.to(given.dtype)


def wide(rows: Tensor) -> Tensor:
    """Rows of half precision in float32, others as they are."""
    return rows.float() if rows.dtype in HALVES else rows
