"""The two readings of the rows J (T x P): their Gramian, and what weights make of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import inf
from operator import add

import numpy as np
import torch
from torch import Tensor

COLUMNS = 65_536
"""Columns that are worked on at once, where an intermediate result is as large as they are."""
SUMMED = 4096
"""Columns whose products are summed in their own dtype: float32 sums over more lose digits."""

TILE = 16
"""Products of as many rows are as fast, for each, as those of more."""

HALVES = (torch.float16, torch.bfloat16)

LEAST = 1e-30
"""The least mean square of a row's numbers: float32 loses products below 1e-38, 1e-8 of it."""
NORMAL = 1.2e-38
"""Below it a number has fewer digits in float32 than it should."""
FAR = 1e30
"""Norms from which float32 sums may overflow, also if rows are times a loss scale, and G is not."""


def gramian_of(blocks: Sequence[Tensor]) -> Tensor:
    """G = J Jᵀ (T, T) in float64 on the CPU, from the blocks (T, p) of J, of any floating dtype and
    device.

    Products of at most 4096 columns are summed in float64: float32 rows cost about 1e-7 of
    |g_i| |g_j|, and not 2e-4 as one product over 1e7 columns does. Where a solution would make more
    than 1e-6 of that, all is multiplied in float64 instead, which takes three times as long; so
    too where a row's numbers are so large or small that float32 has no room for their products.
    Half-precision rows are multiplied in float32.
    """
    gramian = _sum_over(blocks, _in_their_dtype)
    if all(rows.dtype == torch.float64 for rows in blocks):
        return gramian
    again = _out_of_range(gramian, blocks) or _nearly_dependent(gramian)
    return _sum_over(blocks, _in_float64) if again else gramian


def _sum_over(blocks: Sequence[Tensor], pieces_of: Callable[[Tensor], Iterable[Tensor]]) -> Tensor:
    return reduce(add, (reduce(add, map(_product, pieces_of(rows))).cpu() for rows in blocks))


def _in_their_dtype(rows: Tensor) -> Sequence[Tensor]:
    """The rows as they are, but a copy in float32 of some columns at a time."""
    return rows.split(64 * COLUMNS, dim=1) if rows.dtype in HALVES else [rows]


def _in_float64(rows: Tensor) -> Iterator[Tensor]:
    """A copy of some columns at a time: as many as a cache holds, or as are worth a launch."""
    columns = COLUMNS if rows.device.type == "cpu" else 64 * COLUMNS
    return (part.double() for part in rows.split(columns, dim=1))


def _out_of_range(gramian: Tensor, blocks: Sequence[Tensor]) -> bool:
    """Whether products of float32 numbers were infinite or too small, and so G is wrong."""
    sizes = gramian.numpy().diagonal().tolist()
    least = LEAST * sum([rows.shape[1] for rows in blocks])
    if min(sizes) > least and max(sizes) < inf:  # no other product is further out
        return False
    if any(0 < size <= least or size == inf for size in sizes):
        return True
    # Of zeros, or of numbers whose squares are 0: only the row itself tells, and it is one of few.
    suspects = [index for index, size in enumerate(sizes) if size == 0]
    return any(bool(rows[index].any()) for index in suspects for rows in blocks)


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
    # A matrix product knows of no symmetry: of two rows, it makes four products where three do. Of
    # some it is yet the fastest; of many, it is worth it in blocks that are no slower for each.
    half = 1 if len(block) == 2 else len(block) // 2 // TILE * TILE
    if not half:
        return product + torch.bmm(parts, parts.mT).sum(0, dtype=torch.float64)
    first, second = parts[:, :half], parts[:, half:]
    left = torch.bmm(parts, first.mT).sum(0, dtype=torch.float64)
    last = torch.bmm(second, second.mT).sum(0, dtype=torch.float64)
    return product + torch.cat([left, torch.cat([left[half:].T, last])], dim=1)


def combined_safely(blocks: Sequence[Tensor], weights: Tensor, gramian: Tensor) -> list[Tensor]:
    """Jᵀ w (p,) of each block of J, whose Gramian is known: in float64 where the rows cancel, or
    where float32 has no room for a weight that matters or for a sum.
    """
    own, matrix = weights.numpy(), gramian.numpy()
    with np.errstate(all="ignore"):
        shares = (abs(own) * np.sqrt(matrix.diagonal())).tolist()
        square = max(float(own @ matrix @ own), 0.0)
    reach = sum(shares)
    exactly = reach * reach > 64 * square or reach > FAR or not _fit(weights, shares, 1e-8 * reach)
    return [(_combined_exactly if exactly else _combined)(rows, weights) for rows in blocks]


def combined(rows: Tensor, weights: Tensor) -> Tensor:
    """Jᵀ w (P,) in the dtype and on the device of the rows."""
    return (_combined if _fit(weights) else _combined_exactly)(rows, weights)


def _fit(weights: Tensor, shares: Sequence[float] | None = None, least: float = 0.0) -> bool:
    """Whether float32 has room for all weights, but the small ones whose share is not above the
    least.
    """
    own = weights.tolist()
    if min(own) > NORMAL and max(own) < FAR:
        return True
    sizes = [abs(weight) for weight in own]
    pairs = zip(sizes, shares or sizes, strict=True)
    return all(share <= least if size <= NORMAL else not size >= FAR for size, share in pairs)


def _combined_exactly(rows: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(rows.device)
    return torch.cat([(weights @ part).to(rows.dtype) for part in _in_float64(rows)])


def _combined(rows: Tensor, weights: Tensor) -> Tensor:
    if rows.dtype in HALVES:
        return _combined(rows.float(), weights).to(rows.dtype)
    if rows.shape[1] < COLUMNS or rows.device.type != "cpu":
        return weights.to(rows) @ rows
    if len(rows) == 2 and weights[0]:
        # In one pass, where a product of a vector takes a quarter longer. A weight of 0 would hide
        # what is not finite in the first row.
        first, second = weights.tolist()
        return torch.addr(rows[:1], rows.new_ones(1), rows[1], beta=first, alpha=second)[0]
    weights = weights.to(rows.dtype)
    if torch.get_num_threads() == 1:
        return weights @ rows
    # A CPU has one thread for a product of a vector, and all of them for a batch of such products.
    result = rows.new_empty(rows.shape[1])
    whole = rows.shape[1] // COLUMNS * COLUMNS
    parts = rows[:, :whole].unflatten(1, (-1, COLUMNS)).transpose(0, 1)
    below = result[:whole].view(-1, 1, COLUMNS)
    torch.bmm(weights.expand(len(parts), 1, -1), parts, out=below)
    torch.mv(rows[:, whole:].T, weights, out=result[whole:])
    return result


def wide(rows: Tensor) -> Tensor:
    """Rows of half precision in float32, others as they are."""
    return rows.float() if rows.dtype in HALVES else rows
